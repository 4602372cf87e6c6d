"""A client's messages as templates want them, and the text that a template makes of them."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import wrong_type
from kvasir.router.openai.models import ChatBody, ConversationBody, MessageBody, ToolCallBody
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import Arguments, Message

_SHORT_CHARS = 20_000  # of all calls: they are read on the event loop
_MAX_CHARS_OF_CALL = 1 << 19
_MAX_CHARS_OF_CALLS = 1 << 22


async def rendered_chat(
    body: ConversationBody, renderer: ChatRenderer, tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, str]:
    """The text, and how it ends where it goes on with a message that was begun: `continue_final_message`."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise InvalidRequest(message, "continue_final_message", "invalid_value")
    calls = [call for message in body.messages for call in message.tool_calls or ()]
    num_chars = sum(len(call.function.arguments) for call in calls)
    if num_chars > _MAX_CHARS_OF_CALLS:
        message = f"the arguments of all calls may have {_MAX_CHARS_OF_CALLS} characters, and have {num_chars}"
        raise InvalidRequest(message, "messages", "context_length_exceeded")
    is_long = num_chars > _SHORT_CHARS
    messages = await asyncio.to_thread(_template_messages, body) if is_long else _template_messages(body)
    template_kwargs = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        thinking = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
        template_kwargs = {"reasoning_effort": body.reasoning_effort, **thinking, **template_kwargs}
    text = await renderer.render(
        messages,
        template=body.chat_template,
        is_long=is_long,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=body.continue_final_message or False,
        tools=tools,
        template_kwargs=template_kwargs,
    )
    try:
        text.encode()
    except UnicodeEncodeError:  # a template can write what no tokenizer can read
        raise InvalidRequest("the chat template makes half of a surrogate pair", "messages", "invalid_value") from None
    return text, messages[-1]["content"] if body.continue_final_message else ""


def _template_messages(body: ConversationBody) -> list[Message]:
    return [template_message(message, index) for index, message in enumerate(body.messages)]


def template_message(message: MessageBody, index: int) -> Message:
    """With its content as one text, which every template can read; none at all is an empty one."""
    # OpenAI's newer name for the same role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [_call(call) for call in message.tool_calls or ()] or None,
    }
    given = {key: value for key, value in optional.items() if value is not None}
    for name in ("function_call", "audio"):
        if getattr(message, name):
            param = f"messages[{index}].{name}"
            raise InvalidRequest(f"'{param}' is not supported", param, "unsupported_content")
    content = message.refusal if message.content is None and message.role == "assistant" else message.content
    return {"role": role, "content": _content_text(content, message.role, index), **given}


def with_plain_texts(body: ChatBody) -> ChatBody:
    """The same conversation; contents of many parts are one text each."""
    messages = [
        message.model_copy(update={"content": _content_text(message.content, message.role, index)})
        if isinstance(message.content, list)
        else message
        for index, message in enumerate(body.messages)
    ]
    return body.model_copy(update={"messages": messages})


def echoed_text(body: ChatBody) -> str:
    """The last message, if the answer is the same one's: an assistant's, or whoever's, where that one goes on."""
    last = body.messages[-1]
    goes_on = body.continue_final_message or body.add_generation_prompt is False
    if not body.echo or not (goes_on or last.role == "assistant"):
        return ""
    return _content_text(last.content, last.role, len(body.messages) - 1)


def _call(call: ToolCallBody) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """'{"a": 1}' -> a mapping; what is no JSON object stays the text it is, as a model has once written it.

    So does what is longer than models write, for nobody else runs while it is read.
    """
    if len(text) > _MAX_CHARS_OF_CALL:
        return text
    try:
        value = json.loads(text or "{}")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text for a prompt
    except (ValueError, RecursionError):
        return text
    return Arguments(value) if isinstance(value, dict) else text


def _content_text(content: Any, role: str, index: int) -> str:
    param = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise wrong_type(param, "a string or a list of parts")
    return "".join(_part_text(part, f"{param}[{number}]") for number, part in enumerate(content))


def _part_text(part: dict[str, Any], param: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(f"'{param}': {kind!r:.40} is not supported, only text is", param, "unsupported_content")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{param}' has no text", param, "invalid_type")
    return text
