"""A request's body: bounded while it arrives and read without keeping others waiting: a large one apart."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.own_time import own_timeout
from kvasir.router.framed_process import FramedProcess
from kvasir.router.openai.errors import HttpError
from kvasir.router.openai.models import Body
from kvasir.router.openai.parse_process import JSON_OBJECT
from kvasir.router.openai.parsing import json_object, parse
from kvasir.router.openai.sampling import max_prompt_tokens
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import Backend

B = TypeVar("B", bound=Body)
_SMALL_BYTES = 1 << 18  # read on the event loop: handing it to a process would cost more
_MAX_WAITING = 64
_TIMEOUT_S = 10.0


class Bodies:
    """The process starts with the first large body. Belongs to one event loop.

    `longest_prompt`: how many tokens a prompt may have, and how many characters at most; raises while nobody knows.
    """

    def __init__(self, longest_prompt: Callable[[], tuple[int, int]], max_bytes: int) -> None:
        self._longest_prompt = longest_prompt
        self._max_bytes = max_bytes
        self._process: FramedProcess | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def arrived(self, request: Request) -> bytes:
        """HttpError if it is too large, compressed (nobody knows how large it then is), or not said to be JSON: any
        page may have a browser send text without asking us first."""
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            message = "compressed bodies are not taken: send it as it is, without Content-Encoding"
            raise HttpError(415, message, "unsupported_encoding", {"accept-encoding": "identity"})
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        num_bytes = 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            parts.append(part)
        if num_bytes and not _is_json(given := request.headers.get("content-type", "")):
            message = f"the body must be sent as 'Content-Type: application/json', not {given!r:.80}"
            raise HttpError(400, message, "unsupported_content_type")
        return b"".join(parts)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the request body may have at most {self._max_bytes} bytes", "request_too_large")

    async def parse(self, data: bytes, kind: type[B]) -> tuple[B, int]:
        """The body, and how many fields of it nobody knows; those are ignored, as OpenAI's servers do."""
        if len(data) <= _SMALL_BYTES:
            return parse(json_object(data), kind)
        body, num_unknown = await self._read_apart(data, kind.__name__)
        return body, num_unknown

    async def json_object(self, data: bytes) -> dict[str, Any]:
        if len(data) <= _SMALL_BYTES:
            return json_object(data)
        fields: dict[str, Any] = (await self._read_apart(data, JSON_OBJECT))[0]
        return fields

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _read_apart(self, data: bytes, kind: str) -> tuple[Any, int]:
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} large bodies wait to be read")
        max_tokens, max_chars = self._longest_prompt()
        self._num_waiting += 1
        try:
            async with self._turn:
                answer = await self._asked(f"{kind} {max_tokens} {max_chars}\n".encode(), data)
        finally:
            self._num_waiting -= 1
        # Made by our own code; what the client wrote is but strings and numbers in it.
        found: tuple[Any, ...] = await asyncio.to_thread(pickle.loads, answer)
        if len(found) == 3:
            raise InvalidRequest(*found)
        return found[0], found[1]

    async def _asked(self, head: bytes, data: bytes) -> bytes:
        process = await self._running()
        try:
            async with own_timeout(_TIMEOUT_S):
                return await process.ask(head, data)
        except (TimeoutError, EOFError, OSError):
            await self.close()
            raise InvalidRequest("the body takes too much time or memory to read", code="invalid_json") from None
        except BaseException:
            await self.close()
            raise

    async def _running(self) -> FramedProcess:
        if self._process is None or not self._process.is_alive:
            await self.close()
            try:
                self._process = await FramedProcess.start("kvasir.router.openai.parse_process")
            except (TimeoutError, EOFError, OSError):
                raise Overloaded("large bodies cannot be read now") from None
        return self._process


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def longest_prompt(backend: Backend, tokenizer: TextTokenizer) -> tuple[int, int]:
    """In tokens and characters."""
    num_tokens = max_prompt_tokens(backend.limits())
    return num_tokens, tokenizer.max_chars(num_tokens)
