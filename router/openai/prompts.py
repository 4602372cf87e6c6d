"""What stands before the first generated token: prompts of a completion, the rendered conversation of a chat."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.models import MAX_CHOICES, ChatBody, CompletionBody, MessageBody
from kvasir.router.openai.sampling import check_prompt, context_length_exceeded, max_prompt_tokens
from kvasir.router.text.chat_template import ChatTemplate, Message
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits

_MANY_CHARS = 20_000  # a conversation this long is rendered off the event loop


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str


async def completion_prompts(body: CompletionBody, tokenizer: TextTokenizer, limits: ClusterLimits) -> list[Prompt]:
    if isinstance(body.prompt, list) and len(body.prompt) > max(max_prompt_tokens(limits), MAX_CHOICES):
        raise context_length_exceeded(limits, "prompt", f"the prompt has {len(body.prompt)} entries")
    prompts = []
    for entry in _entries(body.prompt):
        if isinstance(entry, str):
            add_special_tokens = body.add_special_tokens is not False
            prompts.append(await _tokenized(entry, add_special_tokens, tokenizer, limits, "prompt"))
        else:
            check_prompt(entry, limits, "prompt")
            prompts.append(Prompt(tuple(entry), tokenizer.decode(entry) if body.echo else ""))
    return prompts


async def chat_prompt(
    body: ChatBody, template: ChatTemplate | None, tokenizer: TextTokenizer, limits: ClusterLimits
) -> Prompt:
    """The template writes the special tokens itself, so none are added to its text."""
    if template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
    if body.continue_final_message and body.add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise InvalidRequest(message, "continue_final_message")
    messages = [_message(message, index) for index, message in enumerate(body.messages)]

    def render() -> str:
        return template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=body.continue_final_message or False,
            template_kwargs=body.chat_template_kwargs,
        )

    is_long = sum(len(message["content"]) for message in messages) > _MANY_CHARS
    text = await asyncio.to_thread(render) if is_long else render()
    return await _tokenized(text, body.add_special_tokens or False, tokenizer, limits, "messages")


async def _tokenized(
    text: str, add_special_tokens: bool, tokenizer: TextTokenizer, limits: ClusterLimits, param: str
) -> Prompt:
    if tokenizer.must_exceed(text, max_prompt_tokens(limits)):
        raise context_length_exceeded(limits, param, f"the prompt has {len(text)} characters")
    token_ids = await tokenizer.encode_off_loop(text, add_special_tokens=add_special_tokens)
    check_prompt(token_ids, limits, param)
    return Prompt(tuple(token_ids), text)


def _entries(prompt: Any) -> Sequence[str | list[int]]:
    """'a' -> ['a'], [1, 2] -> [[1, 2]], ['a', 'b'] and [[1], [2]] as they are"""
    if prompt is None:
        raise InvalidRequest("you must provide 'prompt'", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if prompt == []:
        raise InvalidRequest("'prompt' is an empty list", "prompt", "empty_prompt")
    if _is_list_of(prompt, int):
        return [prompt]
    if _is_list_of(prompt, str) or (_is_list_of(prompt, list) and all(_is_list_of(ids, int) for ids in prompt)):
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest(f"'prompt' may hold at most {MAX_CHOICES} prompts", "prompt", "invalid_value")
        entries: list[str | list[int]] = prompt
        return entries
    raise InvalidRequest("'prompt' must be a string, token ids, or a list of either", "prompt", "invalid_type")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _message(message: MessageBody, index: int) -> Message:
    """With its content as one text, which every template can read."""
    if message.tool_calls:
        param = f"messages[{index}].tool_calls"
        raise InvalidRequest(f"'{param}' is not supported yet", param, "unsupported_parameter")
    # OpenAI's newer name for the same role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": role, "content": _content_text(message.content, message.role, index), **given}


def _content_text(content: Any, role: str, index: int) -> str:
    param = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequest(f"'{param}' must be a string or a list of parts", param, "invalid_type")
    return "".join(_part_text(part, f"{param}[{number}]") for number, part in enumerate(content))


def _part_text(part: dict[str, Any], param: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "refusal"):
        raise InvalidRequest(f"'{param}': {kind!r:.40} is not supported, only text is", param, "unsupported_content")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{param}' has no text", param, "invalid_type")
    return text
