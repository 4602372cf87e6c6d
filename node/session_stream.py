"""One stream of a session over gRPC: reads commands, writes events, and watches that both ends are alive.

Three tasks, and the first to end ends the stream: the reader (the router has closed it), the writer (it cannot be
written, or another stream has taken over), the watch (the router has been silent too long). The engine never waits for
any of them: what cannot be written gathers in the session's log.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from kvasir.common.own_time import own_timeout
from kvasir.node.session import Session, Sessions
from kvasir.proto import common_pb2

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_KV_EVENTS_EVERY_S = 0.1  # at most: what a step gained and lost is little, and is a message of its own
MISSED_HEARTBEATS = 3
_OPEN_TIMEOUT_S = 5.0

Command = Any  # PrefillCommand or DecodeCommand: they share `number`, `open`, `acknowledge` and the oneof's name
Context = grpc.aio.ServicerContext


class SessionHost(Protocol):
    """What a stream needs of its node."""

    sessions: Sessions
    epoch: str

    def handle(self, session: Session, command: Command) -> None:
        """Act on a command. Must neither block nor raise."""
        ...

    def heartbeat(self, session: Session) -> common_pb2.Heartbeat: ...


async def serve_session(host: SessionHost, commands: AsyncIterator[Command], context: Context[Any, Any]) -> None:
    """The body of both services' `Session` call."""
    session, resumed = await _open(host, commands, context)
    stream = _Stream(host, session, context)
    log.info("session %s %s", session.session_id, "resumed" if resumed else "opened")
    try:
        await stream.run(commands, resumed)
    finally:
        host.sessions.detach(session, stream.number)
        log.info("session %s: %s", session.session_id, stream.ended_because)
    if stream.is_router_silent:
        await context.abort(grpc.StatusCode.UNAVAILABLE, stream.ended_because)


async def _open(
    host: SessionHost, commands: AsyncIterator[Command], context: Context[Any, Any]
) -> tuple[Session, bool]:
    try:
        async with own_timeout(_OPEN_TIMEOUT_S):
            first = await anext(commands, None)
    except TimeoutError:
        first = None
    if first is None or not first.HasField("open") or not first.open.session_id:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with `open` and a session id")
    return host.sessions.open(first.open.session_id, first.open.last_event)


class _Stream:
    def __init__(self, host: SessionHost, session: Session, context: Context[Any, Any]) -> None:
        self._host = host
        self._session = session
        self._context = context
        self._num_missed = 0
        self.number = session.stream
        self.is_router_silent = False
        self.ended_because = "the stream was cut"

    async def run(self, commands: AsyncIterator[Command], resumed: bool) -> None:
        opened = common_pb2.SessionOpened(
            node_epoch=self._host.epoch, resumed=resumed, last_command=self._session.last_command
        )
        await self._write(common_pb2.SessionEvent(opened=opened))
        tasks = [asyncio.create_task(one) for one in (self._read(commands), self._write_all(), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self.ended_because = f"the stream was cut: {result}"

    @property
    def _is_current(self) -> bool:
        return self._session.stream == self.number and not self._session.has_ended

    async def _read(self, commands: AsyncIterator[Command]) -> None:
        async for command in commands:
            if not self._is_current:
                return
            self._num_missed = 0
            if command.HasField("acknowledge"):
                self._session.log.acknowledge(command.acknowledge.last_event)
                self._session.changed.set()  # there may be room for more now
            elif self._session.is_new_command(command.number):
                self._host.handle(self._session, command)
        self.ended_because = "the router closed the stream"

    async def _write_all(self) -> None:
        """Events as they come, what is cached a little later, and a heartbeat at least every `HEARTBEAT_S`."""
        loop = asyncio.get_running_loop()
        heartbeat_at_s = kv_events_at_s = loop.time()
        while self._is_current:
            self._session.changed.clear()
            has_news = self._session.kv_feed.has_news and not self._session.log.is_full
            if has_news and loop.time() >= kv_events_at_s:
                self._session.flush_kv_feed()
                kv_events_at_s = loop.time() + _KV_EVENTS_EVERY_S
                has_news = False
            while self._is_current and (event := self._session.log.next_event()) is not None:
                await self._write(event)
            if loop.time() >= heartbeat_at_s:
                await self._write(common_pb2.SessionEvent(heartbeat=self._host.heartbeat(self._session)))
                heartbeat_at_s = loop.time() + HEARTBEAT_S
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(heartbeat_at_s, kv_events_at_s) if has_news else heartbeat_at_s):
                    await self._session.changed.wait()
        self.ended_because = "ended, or taken over by another stream"

    async def _watch(self) -> None:
        """Counts intervals, not seconds: if our own loop was held up, the router was not silent."""
        while self._num_missed < MISSED_HEARTBEATS:
            await asyncio.sleep(HEARTBEAT_S)
            self._num_missed += 1
        self.is_router_silent = True
        self.ended_because = f"the router was silent for {MISSED_HEARTBEATS * HEARTBEAT_S:g} s"

    async def _write(self, event: common_pb2.SessionEvent) -> None:
        await self._context.write(event)
