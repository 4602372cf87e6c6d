"""A request for a response as the request for a chat completion that answers it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import ModelNotFound
from kvasir.router.openai.models import ChatBody, GenerationBody
from kvasir.router.openai.parsing import first_problem
from kvasir.router.openai.responses.body import AllowedFunctions, NamedFunction, ResponsesBody
from kvasir.router.openai.responses.items import ChatMessage

# Names of a chat's fields, and the client's own for the same.
_NAMES = (
    (re.compile(r"^messages.*"), "input"),  # they are other ones than items
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)
_NOT_A_CHATS = frozenset({"n", "max_tokens"})


def chat_body(body: ResponsesBody, messages: Sequence[ChatMessage]) -> ChatBody:
    """`messages`: the conversation so far, without the instructions. Raises InvalidRequest."""
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in GenerationBody.model_fields if name not in _NOT_A_CHATS
    }
    fields |= {
        "messages": [*messages],
        "max_completion_tokens": body.max_output_tokens or body.max_tokens,
        "tools": None if body.tools is None else [_tool(tool.model_dump()) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice) if body.tools or body.tool_choice != "auto" else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if (response_format := _response_format(body)) is not None:
        fields["response_format"] = response_format
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise first_problem(error) from None


@contextmanager
def named_as_given() -> Iterator[None]:
    """What is wrong with the chat is told under the name that the client knows."""
    try:
        yield
    except ModelNotFound:
        raise
    except InvalidRequest as error:
        if error.param is None:
            raise
        param = error.param
        for name, own in _NAMES:
            param = name.sub(own, param)
        raise InvalidRequest(str(error).replace(f"'{error.param}'", f"'{param}'"), param, error.code) from error


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | NamedFunction | AllowedFunctions | None) -> Any:
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """{"type": "json_schema", "name": .., "schema": ..} -> the chat's, which is one level deeper"""
    format_ = body.text.format if body.text else None
    if format_ is None or format_.get("type") != "json_schema":
        return format_
    return {"type": "json_schema", "json_schema": {key: value for key, value in format_.items() if key != "type"}}
