"""Renders conversations without keeping anybody else waiting: long ones in a thread, a stranger's template in a process
of its own."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.own_time import own_timeout
from kvasir.router.framed_process import FramedProcess
from kvasir.router.text.chat_template import ChatTemplate, Message

_SHORT_CHARS = 20_000  # rendered on the event loop: handing it to a thread would cost more
_MAX_WAITING = 64
_MAX_TEMPLATE_CHARS = 1 << 20


class ChatRenderer:
    """`template`: the model's own. `trusts_requests`: a request may bring one."""

    def __init__(
        self, template: ChatTemplate | None, *, trusts_requests: bool = False, timeout_s: float = 10.0
    ) -> None:
        self._template = template
        self._trusts_requests = trusts_requests
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="template")
        self._processes = asyncio.Semaphore(2)
        self._num_waiting = 0

    async def render(
        self, messages: Sequence[Message], *, template: str | None = None, is_long: bool = False, **options: Any
    ) -> str:
        """See `ChatTemplate.render`. Raises InvalidRequest also for what takes too long.

        `is_long`: it is, though its messages do not look so.
        """
        if template is not None:
            return await self._render_apart(template, [*messages], options)
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        own = self._template
        if not is_long and _num_chars(messages, options.get("tools", ())) < _SHORT_CHARS:
            return own.render(messages, **options)
        loop = asyncio.get_running_loop()
        try:
            async with own_timeout(self._timeout_s):
                return await loop.run_in_executor(self._threads, lambda: own.render(messages, **options))
        except TimeoutError:
            raise _too_slow("messages", self._timeout_s) from None

    async def _render_apart(self, template: str, messages: list[Message], options: dict[str, Any]) -> str:
        if not self._trusts_requests:
            message = "'chat_template' is a program, and this router runs none of its clients': "
            raise InvalidRequest(message + "--trust-request-chat-template", "chat_template", "unsupported_parameter")
        if len(template) > _MAX_TEMPLATE_CHARS:
            message = f"'chat_template' may have at most {_MAX_TEMPLATE_CHARS} characters"
            raise InvalidRequest(message, "chat_template", "invalid_value")
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} templates of requests wait to be rendered")
        special_tokens = {} if self._template is None else self._template.special_tokens
        work = {"template": template, "special_tokens": special_tokens, "messages": messages, "options": options}
        self._num_waiting += 1
        try:
            async with self._processes:
                answer = await _in_a_process(await asyncio.to_thread(_to_json, work), self._timeout_s)
        finally:
            self._num_waiting -= 1
        if "error" in answer:
            raise InvalidRequest(answer["error"], "chat_template", "invalid_template")
        return str(answer["text"])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _num_chars(messages: Sequence[Message], tools: Sequence[Any]) -> int:
    """About so many are to be rendered."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return sum(20 + len(message["content"]) for message in messages) + 200 * len(calls) + 1000 * len(tools)


def _to_json(work: dict[str, Any]) -> bytes:
    try:
        return json.dumps(work).encode()
    except RecursionError:
        raise InvalidRequest("the conversation is nested too deeply", "messages", "invalid_value") from None


async def _in_a_process(work: bytes, timeout_s: float) -> dict[str, Any]:
    """A new one each time: what one stranger's template does to it is no other's concern."""
    process: FramedProcess | None = None
    try:
        async with own_timeout(timeout_s):
            process = await FramedProcess.start("kvasir.router.text.render_process")
            answer: dict[str, Any] = json.loads(await process.ask(work))
            return answer
    except TimeoutError:
        raise _too_slow("chat_template", timeout_s) from None
    except (EOFError, OSError):
        raise InvalidRequest("'chat_template' wants too much memory or time", "chat_template") from None
    finally:
        if process is not None:
            await process.end()


def _too_slow(param: str, timeout_s: float) -> InvalidRequest:
    return InvalidRequest(f"the chat template has not come to its end within {timeout_s:g} s", param)
