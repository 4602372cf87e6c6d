"""Items of a response's input, and of its output, as messages of a conversation."""

from collections.abc import Sequence
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import missing, wrong_type

_MAX_ITEMS = 10_000
Item = dict[str, Any]
ChatMessage = dict[str, Any]


def input_items(given: Any) -> list[Item]:
    """A text is what the user says."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is None:
        raise missing("input")
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise wrong_type("input", "a string or a list of items")
    if not 0 < len(given) <= _MAX_ITEMS:
        raise InvalidRequest(f"'input' must have 1 to {_MAX_ITEMS} items", "input", "invalid_value")
    return given


def messages_of(items: Sequence[Item]) -> list[ChatMessage]:
    """What an assistant thinks, says and calls in one go is one message."""
    messages: list[ChatMessage] = []
    assistant: ChatMessage | None = None  # the one that calls belong to
    for index, item in enumerate(items):
        param = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "reasoning":
            assistant = _begin(messages, assistant, is_new=assistant is not None and len(assistant) > 1)
            assistant["reasoning"] = assistant.get("reasoning", "") + _thought(item)
        elif kind == "function_call":
            assistant = _begin(messages, assistant)
            assistant.setdefault("tool_calls", []).append(_call(item, param))
        elif kind == "message" and item.get("role") == "assistant":
            assistant = _begin(
                messages, assistant, is_new=assistant is not None and bool(assistant.keys() & {"content", "tool_calls"})
            )
            assistant["content"] = item.get("content")
        else:
            assistant = None
            messages.append(_other(item, kind, param))
    return messages


def check_outputs(messages: Sequence[ChatMessage]) -> None:
    """Each of a tool's is that of a call before it."""
    known: set[str] = set()
    for message in messages:
        known.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and (call_id := message["tool_call_id"]) not in known:
            text = f"No tool call found for function call output with call_id {call_id[:80]}."
            raise InvalidRequest(text, "input", "invalid_value")


def _begin(messages: list[ChatMessage], assistant: ChatMessage | None, *, is_new: bool = False) -> ChatMessage:
    if assistant is None or is_new:
        assistant = {"role": "assistant"}
        messages.append(assistant)
    return assistant


def _other(item: Item, kind: Any, param: str) -> ChatMessage:
    if kind == "message":
        if item.get("role") not in ("user", "system", "developer"):
            message = f"'{param}.role' must be user, assistant, system or developer"
            raise InvalidRequest(message, f"{param}.role", "invalid_value")
        return {"role": item["role"], "content": item.get("content")}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": _text(item, "call_id", param), "content": item.get("output")}
    raise InvalidRequest(f"'{param}': items of type {kind!r:.60} are not supported", param, "unsupported_content")


def _call(item: Item, param: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", param), "arguments": _text(item, "arguments", param)}
    return {"id": _text(item, "call_id", param), "type": "function", "function": function}


def _thought(item: Item) -> str:
    """Its own text, or at least its summary; one that is encrypted says nothing to this model."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        return ""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _text(item: Item, name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{param}.{name}", "a string")
    return value
