"""Resumable streams noted in Redis (or Valkey): any router that their client comes back to goes on with them.

A stream is one list there: who has it, its endpoint, its head, then a line for each delta. Whoever takes it puts its
own name in front; the one that had it, should it be alive, hears so with its next token, which no client then sees. So
no router has to know others, or whether they live.

A server that does not answer costs a stream this way back, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError
from redis.exceptions import RedisError

from kvasir.common.logging import Sparse
from kvasir.common.own_time import own_timeout
from kvasir.proto import workers_pb2 as pb
from kvasir.router.batches import Batches
from kvasir.router.openai.errors import StoreUnavailable
from kvasir.router.openai.stream_notes import StreamLog, StreamOrigin, TakenStream, line_of
from kvasir.router.redis_client import close_client, redis_client
from kvasir.router.types import RoutedRequest, TokenDelta

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_LOOK_AGAIN_S = 1.0

# Each may be sent twice: a connection breaks after the server has acted, too.
_BEGIN = """
redis.call('DEL', KEYS[1])
redis.call('RPUSH', KEYS[1], ARGV[1], ARGV[2], ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""
_ADD = """
local holder = redis.call('LINDEX', KEYS[1], 0)
if not holder then return 'gone' end
if holder ~= ARGV[1] then return 'taken' end
local missing = tonumber(ARGV[2]) + 3 - redis.call('LLEN', KEYS[1])
if missing == 0 then redis.call('RPUSH', KEYS[1], ARGV[3]) end
if missing == 0 or missing == -1 then return 'noted' end
redis.call('DEL', KEYS[1])
return 'gone'
"""
_FORGET = """
if redis.call('LINDEX', KEYS[1], 0) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
_TAKE = """
if redis.call('LINDEX', KEYS[1], 1) ~= ARGV[2] then return {} end
redis.call('LSET', KEYS[1], 0, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('LRANGE', KEYS[1], 2, -1)
"""


@dataclass(frozen=True, slots=True)
class _Call:
    script: str
    key: str
    arguments: tuple[str | bytes | int, ...]


class RedisNotes:
    """Of all streams of this process.

    `max_life_s`, `max_grace_s`: of one request; a stream that nobody came back to is forgotten after both.
    `max_bytes`: of all that this process has noted; beyond, streams are not noted. `on_failure`: of one stream.
    """

    def __init__(
        self,
        url: str,
        *,
        max_life_s: float,
        max_grace_s: float,
        max_bytes: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """ValueError for a URL that is none."""
        self._redis = redis_client(url)
        self._max_life_s = max_life_s
        self._max_grace_s = max_grace_s
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._on_failure = on_failure
        self._sparse = Sparse()
        self._calls: Batches[_Call, Any] = Batches(self._answers)
        self._until_up: asyncio.Task[None] | None = None  # while the server does not answer

    def new_log(self, owner: str, origin: StreamOrigin, grace_s: float) -> StreamLog:
        return RedisStreamLog(self, _key(owner, origin.response_id), origin, grace_s, secrets.token_hex(16))

    async def take(self, owner: str, response_id: str, last_event: int, endpoint: str) -> TakenStream | bool:
        """Raises StoreUnavailable."""
        key, holder = _key(owner, response_id), secrets.token_hex(16)
        noted = await self.call(_TAKE, key, holder, endpoint, self.ttl_ms(None, self._max_grace_s))
        if noted is None:
            self._on_failure()
            raise StoreUnavailable("what is noted of streams cannot be read now")
        if not noted:
            return False
        try:
            head = pb.StreamHead.FromString(noted[0])
            origin = StreamOrigin.of(response_id, head)
            stream_log = RedisStreamLog(self, key, origin, head.grace_s, holder)
            found = TakenStream.of(origin, head, b"".join(noted[1:]), stream_log, last_event)
        except (DecodeError, ValueError, TypeError, LookupError) as error:
            log.warning("a stream that is noted in Redis cannot be read: %s", error)
            return False
        stream_log.go_on_behind(noted)
        return found

    async def close(self) -> None:
        await self._calls.close()
        if self._until_up is not None:
            self._until_up.cancel()
            await asyncio.gather(self._until_up, return_exceptions=True)
        await close_client(self._redis)

    def call(self, script: str, key: str, *arguments: str | bytes | int) -> asyncio.Future[Any]:
        """What it answers; None if nothing."""
        return self._calls.add(_Call(script, key, arguments))

    def ttl_ms(self, life_s: float | None, grace_s: float) -> int:
        return round(1000 * ((self._max_life_s if life_s is None else min(life_s, self._max_life_s)) + grace_s)) + 1000

    def has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def hold(self, num_bytes: int) -> None:
        """So much more."""
        self._num_bytes += num_bytes

    def failed(self, why: str) -> None:
        self._on_failure()
        if self._sparse.allows("failed"):
            log.warning("a stream cannot be gone on with by another router: %s", why)

    async def _answers(self, calls: Sequence[_Call]) -> list[Any]:
        if self._until_up is not None:
            return [None] * len(calls)
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.eval(call.script, 1, call.key, *call.arguments)
                async with own_timeout(_TIMEOUT_S):
                    answers = await pipe.execute(raise_on_error=False)
        except Exception as error:  # whatever it is: no stream waits for it
            if not isinstance(error, RedisError | OSError):
                log.exception("the Redis that streams are noted in cannot be asked")
            self._until_up = asyncio.create_task(self._wait_until_up())
            return [None] * len(calls)
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    async def _wait_until_up(self) -> None:
        """No stream is kept waiting to find out."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            with suppress(Exception):  # whatever it is, it may be better the next time
                async with own_timeout(_TIMEOUT_S):
                    await self._redis.ping()
                self._until_up = None
                return


class RedisStreamLog:
    """A `StreamLog`. Once something could not be noted, nothing is: what is there is too old to go on from."""

    def __init__(self, notes: RedisNotes, key: str, origin: StreamOrigin, grace_s: float, holder: str) -> None:
        self._notes = notes
        self._key = key
        self._origin = origin
        self._grace_s = grace_s
        self._holder = holder  # is us, and nobody else
        self.branch = ""
        self._num_noted = 0  # lines
        self._num_bytes = 0
        self._is_noted = True

    def go_on_behind(self, noted: Sequence[bytes]) -> None:
        """The head and the lines of one that has been taken."""
        self._num_noted = len(noted) - 1
        self._num_bytes = sum(map(len, noted))
        self._notes.hold(self._num_bytes)

    async def begin(self, requests: Sequence[RoutedRequest]) -> None:
        head = self._origin.head(requests, self._grace_s).SerializeToString()
        ttl_ms = self._notes.ttl_ms(self._origin.timeout_s, self._grace_s)
        if self._has_room(len(head)):
            answer = await self._notes.call(_BEGIN, self._key, self._holder, self._origin.endpoint, head, ttl_ms)
            if answer is None:
                self._give_up("their Redis does not answer")
        self._origin = replace(self._origin, body=b"")  # it may be large, and is not wanted any more

    async def add(self, delta: TokenDelta) -> None:
        """Another router has taken the stream: then the generation is cancelled here."""
        line = line_of(delta)
        if not self._is_noted or not self._has_room(len(line)):
            return
        answer = await self._notes.call(_ADD, self._key, self._holder, self._num_noted, line)
        self._num_noted += 1
        if answer == b"taken":
            raise asyncio.CancelledError("another router goes on with it")
        if answer != b"noted":
            self._give_up("their Redis does not answer" if answer is None else "their Redis has lost it")

    def forget(self) -> None:
        self.give_back()
        self._notes.call(_FORGET, self._key, self._holder)

    def give_back(self) -> None:
        """Whoever asks for it may have it in any case."""
        self._is_noted = False
        self._notes.hold(-self._num_bytes)
        self._num_bytes = 0

    def _has_room(self, num_bytes: int) -> bool:
        if not self._notes.has_room(num_bytes):
            self._give_up("too much is noted")
            return False
        self._notes.hold(num_bytes)
        self._num_bytes += num_bytes
        return True

    def _give_up(self, why: str) -> None:
        self.branch = self._holder
        self.forget()
        self._notes.failed(why)


def _key(owner: str, response_id: str) -> str:
    return f"kvasir:stream:{owner}:{response_id}"
