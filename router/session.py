"""The router's end of a session: one stream to one node, which carries all of its requests.

    begin, send --> commands, numbered, kept until the node says that they arrived --> stream
    sinks       <-- events, numbered, each addressed to one request                <-- stream

A stream that breaks is opened again at once: the node then repeats the events behind the last that came here, and the
router the commands behind the last that arrived there. The session is lost when the node has been silent for
`heartbeat_timeout_s`, when its engine is stuck, or when it no longer knows the session. Each request is then told so.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvasir.common.errors import InvalidRequest, NodeUnavailable
from kvasir.common.grpc_options import MAX_MESSAGE_BYTES
from kvasir.proto import common_pb2
from kvasir.router import wire
from kvasir.router.grpc_stream import GrpcStream, open_stream
from kvasir.router.node_events import Failed, error_from_failure, kv_events_from_proto
from kvasir.router.nodes import NodeInfo, NodeLoad, Role
from kvasir.router.pace import Pace
from kvasir.router.prefix_index import KVEvents
from kvasir.router.session_commands import Commands
from kvasir.router.sinks import Sink, Sinks

log = logging.getLogger(__name__)

_LOOKS = 6  # in the time that a node may be silent
_RECONNECT_AFTER_S = 0.05
_ACKNOWLEDGE_EVERY_S = 0.4  # below what a node expects of us
_METHODS = {
    Role.PREFILL: "/kvasir.v1.PrefillService/Session",
    Role.DECODE: "/kvasir.v1.DecodeService/Session",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    heartbeat_timeout_s: float = 1.5
    engine_age_limit_s: float = 30.0
    open_timeout_s: float = 5.0
    pace: Pace = field(default_factory=lambda: Pace(longest_s=0))
    router_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # a node keeps one session for each router


class NodeSession:
    """`on_heartbeat` hears (load, draining), `on_kv_events` what the node's prefix cache gained and lost; `on_lost` is
    called before the requests are told."""

    def __init__(self, info: NodeInfo, secret: str | None, settings: SessionSettings, place: str = "") -> None:
        """place: where it was found, if not by its address"""
        self.info = info
        self._place = place or info.address
        self.on_heartbeat: Callable[[NodeLoad, bool], None] = lambda load, draining: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_kv_events: Callable[[KVEvents], None] = lambda events: None
        self._secret = secret
        self._settings = settings
        self._session_id = f"{settings.router_id}/{uuid.uuid4().hex}"
        self._commands = Commands()
        self._sinks = Sinks(settings.pace, self._distrust)
        self._stream: GrpcStream
        self._last_event = 0
        self._has_opened = False
        self._silent_s = 0.0
        self._trouble = "no answer"
        self._first_load: asyncio.Future[NodeLoad] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life --------------------------------------------------------------------------------------------------

    async def open(self) -> NodeLoad:
        """Returns the node's load as of its first heartbeat. Raises NodeUnavailable."""
        works = (self._keep_connected(), self._acknowledge(), self._watch())
        self._tasks = [asyncio.create_task(work) for work in works]
        waiting: list[asyncio.Future[Any]] = [self._first_load, self._lost]
        timeout_s = self._settings.open_timeout_s
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._first_load.done() and not self._lost.done():
            return self._first_load.result()
        self._lose(self._trouble)
        raise NodeUnavailable(f"{self.info.address}: {self._lost.result()}")

    async def lost(self) -> str:
        """Waits until the session has ended; says why."""
        return await asyncio.shield(self._lost)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def close(self) -> None:
        self._lose("the router has closed the session")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what requests use: nothing of it blocks -------------------------------------------------------------------

    def begin(self, sink: Sink) -> int:
        """A new handle; `sink` is called with every event of it until `forget`."""
        handle = self._sinks.add(sink)
        if self.is_lost:
            sink(Failed(self._loss()))
        return handle

    def forget(self, handle: int) -> None:
        self._sinks.remove(handle)

    def send(self, command: wire.Command) -> None:
        """A request that is too long for a message fails alone: streams would break with it, one after the other."""
        if not self.is_lost and not self._commands.add(command):
            why = f"for a node the request is {command.ByteSize():,} bytes long; {MAX_MESSAGE_BYTES:,} at most are sent"
            self._sinks.tell(command.start.handle, Failed(InvalidRequest(why)))

    @property
    def all_confirmed(self) -> bool:
        """The node has said that all commands have arrived."""
        return self._commands.all_confirmed

    @property
    def num_requests(self) -> int:
        return len(self._sinks)

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        while not self.is_lost:
            try:
                self._trouble = await self._one_stream()
            except (OSError, ValueError) as error:  # the latter: no address at all
                self._trouble = f"cannot connect: {error}"
            await asyncio.sleep(_RECONNECT_AFTER_S)

    async def _one_stream(self) -> str:
        """Why it has ended."""
        method = _METHODS[self.info.role]
        self._stream = stream = await open_stream(self._place, method, self._secret, self._heard)
        try:
            opening = wire.open_session(self.info.role, self._session_id, self._last_event)
            stream.send(opening.SerializeToString())
            return await stream.ended()
        finally:
            self._commands.end_stream()
            stream.close()

    def _heard(self, message: bytes) -> None:
        if self.is_lost:
            return
        self._silent_s = 0.0
        try:
            event = common_pb2.SessionEvent.FromString(message)
            if event.WhichOneof("event") == "opened":
                self._opened(event.opened)
            else:
                self._receive(event)
        except Exception as error:
            self._distrust(error)

    def _distrust(self, error: Exception) -> None:
        """We cannot read what the node says, and so trust nothing behind it."""
        log.error("%s: session failed", self.info.address, exc_info=error)
        self._lose(f"cannot read what it says: {error!r}")

    async def _acknowledge(self) -> None:
        """Up to which event all have come, and with it that we are here."""
        await asyncio.sleep(random.uniform(0, _ACKNOWLEDGE_EVERY_S))  # not to all nodes at once
        while True:
            self._commands.send_aside(wire.acknowledge(self.info.role, self._last_event))
            await asyncio.sleep(_ACKNOWLEDGE_EVERY_S)

    def _opened(self, opened: common_pb2.SessionOpened) -> None:
        """The first event of every stream."""
        if opened.node_epoch != self.info.epoch:
            self._lose(f"the node has restarted (epoch {opened.node_epoch}, not {self.info.epoch})")
        elif self._has_opened and not opened.resumed:
            self._lose("the node no longer knows the session")
        else:
            self._has_opened = True
            self._commands.begin_stream(self._stream.send, opened.last_command)

    def _receive(self, event: common_pb2.SessionEvent) -> None:
        if event.number and not self._is_next(event.number):
            return
        kind = event.WhichOneof("event")
        if kind == "step":
            self._sinks.step(event.step)
        elif kind == "failed":
            self._sinks.tell(event.failed.handle, Failed(error_from_failure(event.failed, self.info.address)))
        elif kind == "heartbeat":
            self._heartbeat(event.heartbeat)
        elif kind == "kv_events":
            self.on_kv_events(kv_events_from_proto(event.kv_events))

    def _is_next(self, number: int) -> bool:
        """Events come once and in order: one that we have is skipped, a gap is a loss."""
        if number <= self._last_event:
            return False
        if number != self._last_event + 1:
            self._lose(f"events {self._last_event + 1} to {number - 1} never came")
            return False
        self._last_event = number
        return True

    def _heartbeat(self, heartbeat: common_pb2.Heartbeat) -> None:
        self._commands.confirm(heartbeat.last_command)
        if heartbeat.engine_age_s > self._settings.engine_age_limit_s:
            self._lose(f"its engine has not finished a step for {heartbeat.engine_age_s:.1f} s")
            return
        load = wire.load_from_proto(heartbeat.load)
        if not self._first_load.done():
            self._first_load.set_result(load)
        self.on_heartbeat(load, heartbeat.draining)

    # --- loss ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Counts silence in small steps, so that a pause of our own event loop is not taken for the node's."""
        while not self.is_lost:
            await asyncio.sleep(self._settings.heartbeat_timeout_s / _LOOKS)
            self._silent_s += self._settings.heartbeat_timeout_s / _LOOKS
            if self._has_opened and self._silent_s > self._settings.heartbeat_timeout_s:
                self._lose(f"silent for {self._silent_s:.1f} s ({self._trouble})")

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            self._sinks.deliver()
        if self.is_lost:  # also by what was delivered
            return
        self._lost.set_result(reason)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._commands.clear()
        self.on_lost()
        self._sinks.tell_all(lambda: Failed(self._loss()))

    def _loss(self) -> NodeUnavailable:
        return NodeUnavailable(f"{self.info.address}: {self._lost.result()}")
