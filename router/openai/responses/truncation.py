"""`truncation: "auto"`: a conversation that is too long goes on without its beginning."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.models import ChatBody
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.responses.items import ChatMessage
from kvasir.router.openai.responses.request import chat_body, named_as_given
from kvasir.router.openai.sampling import resolve_max_tokens

T = TypeVar("T")
_INSTRUCTING = ("system", "developer")


async def asked_with_what_fits(
    api: OpenAIApi, body: ResponsesBody, messages: list[ChatMessage], ask: Callable[[ChatBody], Awaitable[T]]
) -> tuple[list[ChatMessage], T]:
    """The messages that `ask` was given, and what it answered. Raises InvalidRequest, in the client's own terms."""

    async def fits(some: Sequence[ChatMessage]) -> bool:
        try:
            chat = chat_body(body, some)
            prompt, _, limits = await api.chat_prompt(chat)
            resolve_max_tokens(chat.asked_max_tokens, chat.default_max_tokens, len(prompt.token_ids), limits)
        except InvalidRequest:  # also of a template that takes no conversation which begins like that
            return False
        return True

    with named_as_given():
        try:
            return messages, await ask(chat_body(body, messages))
        except InvalidRequest as error:
            if body.truncation != "auto" or error.code != "context_length_exceeded":
                raise
            kept = await longest_end(messages, fits)
            if kept is None:
                raise
        return kept, await ask(chat_body(body, kept))


async def longest_end(
    messages: Sequence[ChatMessage], fits: Callable[[Sequence[ChatMessage]], Awaitable[bool]]
) -> list[ChatMessage] | None:
    """It begins with what a user says, if one that does fits: as templates want it. None: not even the last fits."""
    for starts in _starts(messages):
        low, high = 0, len(starts)  # the earliest that fits is in between; all behind it do
        while low < high:
            middle = (low + high) // 2
            if await fits(_from(messages, starts[middle])):
                high = middle
            else:
                low = middle + 1
        if low < len(starts):
            return _from(messages, starts[low])
    return None


def _starts(messages: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
    """Where to begin: with a user, or, if even the last turn is too long, within that."""
    users = [at for at, message in enumerate(messages) if at and message["role"] == "user"]
    last = users[-1] if users else 0
    return users, [at for at in range(last + 1, len(messages)) if messages[at]["role"] == "assistant"]


def _from(messages: Sequence[ChatMessage], start: int) -> list[ChatMessage]:
    """What instructs stays, and what a tool said goes with the call that it was asked by."""
    kept = [message for at, message in enumerate(messages) if at >= start or message["role"] in _INSTRUCTING]
    called = {call["id"] for message in kept for call in message.get("tool_calls", ())}
    return [message for message in kept if message["role"] != "tool" or message["tool_call_id"] in called]
