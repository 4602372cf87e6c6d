"""What stands before the first generated token: prompts of a completion, the rendered conversation of a chat."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.conversation import rendered_chat
from kvasir.router.openai.errors import missing, wrong_type
from kvasir.router.openai.models import MAX_CHOICES, ChatBody, CompletionBody, whole
from kvasir.router.openai.sampling import check_prompt, context_length_exceeded, max_prompt_tokens
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits

_PROMPT = "a string, token ids, or a list of either"


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str
    begun_answer: str = ""  # how the text ends, where the answer goes on with a message that was begun


async def completion_prompts(body: CompletionBody, tokenizer: TextTokenizer, limits: ClusterLimits) -> list[Prompt]:
    if isinstance(body.prompt, list) and len(body.prompt) > max(max_prompt_tokens(limits), MAX_CHOICES):
        raise context_length_exceeded(limits, "prompt", f"the prompt has {len(body.prompt)} entries")
    prompts: list[Prompt] = []
    for entry in _entries(body.prompt):
        if prompts:
            await asyncio.sleep(0)  # each may be as long as is read on the event loop
        if isinstance(entry, str):
            add_special_tokens = body.add_special_tokens is not False
            prompts.append(await _tokenized(entry, add_special_tokens, tokenizer, limits, "prompt"))
        else:
            check_prompt(entry, limits, "prompt")
            prompts.append(Prompt(tuple(entry), tokenizer.decode(entry) if body.echo else ""))
    return prompts


async def chat_prompt(
    body: ChatBody,
    renderer: ChatRenderer,
    tokenizer: TextTokenizer,
    limits: ClusterLimits,
    tools: Sequence[dict[str, Any]] = (),
) -> Prompt:
    """The template writes the special tokens itself, so none are added to its text."""
    text, begun_answer = await rendered_chat(body, renderer, tools)
    prompt = await _tokenized(text, body.add_special_tokens or False, tokenizer, limits, "messages")
    return replace(prompt, begun_answer=begun_answer)


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
        raise missing("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if prompt == []:
        raise InvalidRequest("'prompt' is an empty list", "prompt", "empty_prompt")
    prompt = _with_whole_ids(prompt)
    if _is_list_of(prompt, int):
        return [prompt]
    if not (_is_list_of(prompt, str) or _is_list_of(prompt, list)):
        raise wrong_type("prompt", _PROMPT)
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequest(f"'prompt' may hold at most {MAX_CHOICES} prompts", "prompt", "invalid_value")
    entries: list[str | list[int]] = [_with_whole_ids(entry) for entry in prompt]
    if not all(isinstance(entry, str) or _is_list_of(entry, int) for entry in entries):
        raise wrong_type("prompt", _PROMPT)
    return entries


def _with_whole_ids(value: Any) -> Any:
    return [whole(entry) for entry in value] if isinstance(value, list) and float in set(map(type, value)) else value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)
