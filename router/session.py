"""The router's end of a session: one stream to one node, which carries all of its requests.

    begin, send --> commands, numbered, kept until the node says that they arrived --> stream
    sinks       <-- events, numbered, each addressed to one request                <-- stream

A stream that breaks is opened again at once: the node then repeats the events behind the last that came here, and the
router the commands behind the last that arrived there. The session is lost when the node has been silent for
`heartbeat_timeout_s`, when its engine is stuck, or when it no longer knows the session. Each request is then told so.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
import random
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from kvasir.common.errors import NodeUnavailable
from kvasir.proto import common_pb2, decode_pb2_grpc, prefill_pb2_grpc
from kvasir.router import wire
from kvasir.router.node_events import Event, Failed, error_from_failure, events_from_steps, kv_events_from_proto
from kvasir.router.nodes import NodeInfo, NodeLoad, Role
from kvasir.router.pace import Pace
from kvasir.router.prefix_index import KVEvents

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]

_ACKNOWLEDGE_EVERY_S = 0.4  # below what a node expects of us
_LOOKS = 6  # in the time that a node may be silent
_RECONNECT_AFTER_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    heartbeat_timeout_s: float = 1.5
    engine_age_limit_s: float = 30.0
    open_timeout_s: float = 5.0
    pace: Pace = field(default_factory=lambda: Pace(longest_s=0))
    router_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # a node keeps one session for each router


def node_stub(role: Role, channel: grpc.aio.Channel) -> Any:
    """Both services have the same three methods."""
    stub = prefill_pb2_grpc.PrefillServiceStub if role is Role.PREFILL else decode_pb2_grpc.DecodeServiceStub
    return stub(channel)


class NodeSession:
    """`on_heartbeat` hears (load, draining), `on_kv_events` what the node's prefix cache gained and lost; `on_lost` is
    called before the requests are told."""

    def __init__(self, info: NodeInfo, channel: grpc.aio.Channel, settings: SessionSettings) -> None:
        self.info = info
        self.on_heartbeat: Callable[[NodeLoad, bool], None] = lambda load, draining: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_kv_events: Callable[[KVEvents], None] = lambda events: None
        self._stub = node_stub(info.role, channel)
        self._settings = settings
        self._session_id = f"{settings.router_id}/{uuid.uuid4().hex}"
        self._sinks: dict[int, Sink] = {}
        self._last_handle = 0
        self._last_command = 0
        self._last_event = 0
        self._unconfirmed: deque[wire.Command] = deque()
        self._to_write: deque[wire.Command] = deque()
        self._wake_writer = asyncio.Event()
        self._steps: list[common_pb2.StepOutput] = []  # that have come, and are to be delivered together
        self._delivery: asyncio.TimerHandle | None = None
        self._delivered_s = 0.0
        self._has_opened = False
        self._silent_s = 0.0
        self._trouble = "no answer"
        self._first_load: asyncio.Future[NodeLoad] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life --------------------------------------------------------------------------------------------------

    async def open(self) -> NodeLoad:
        """Returns the node's load as of its first heartbeat. Raises NodeUnavailable."""
        self._tasks = [asyncio.create_task(self._keep_connected()), asyncio.create_task(self._watch())]
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
        self._last_handle += 1
        self._sinks[self._last_handle] = sink
        if self.is_lost:
            sink(Failed(self._loss()))
        return self._last_handle

    def forget(self, handle: int) -> None:
        self._sinks.pop(handle, None)

    def send(self, command: wire.Command) -> None:
        if self.is_lost:
            return
        self._last_command += 1
        command.number = self._last_command
        self._unconfirmed.append(command)
        self._to_write.append(command)
        self._wake_writer.set()

    @property
    def num_requests(self) -> int:
        return len(self._sinks)

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        while not self.is_lost:
            try:
                await self._one_stream()
                self._trouble = "the node has closed the stream"
            except grpc.aio.AioRpcError as error:
                self._trouble = f"{error.code().name}: {error.details()}"
            except asyncio.InvalidStateError:  # the call ended while we wrote
                self._trouble = "the stream has ended"
            except Exception as error:  # a message that we cannot read: nothing behind it can be trusted
                log.exception("%s: session failed", self.info.address)
                self._lose(f"cannot read what it says: {error!r}")
            await asyncio.sleep(_RECONNECT_AFTER_S)

    async def _one_stream(self) -> None:
        call = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(wire.open_session(self.info.role, self._session_id, self._last_event))
            async for event in call:
                if event.WhichOneof("event") == "opened":
                    self._opened(event.opened)
                    writer = writer or asyncio.create_task(self._write(call))
                self._silent_s = 0.0
                self._receive(event)
                if self.is_lost:
                    return
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                with suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await writer

    def _opened(self, opened: common_pb2.SessionOpened) -> None:
        """The first event of every stream."""
        if opened.node_epoch != self.info.epoch:
            self._lose(f"the node has restarted (epoch {opened.node_epoch}, not {self.info.epoch})")
        elif self._has_opened and not opened.resumed:
            self._lose("the node no longer knows the session")
        else:
            self._has_opened = True
            self._confirm(opened.last_command)
            self._to_write = deque(self._unconfirmed)

    async def _write(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        acknowledge_at_s = loop.time() + random.uniform(0, _ACKNOWLEDGE_EVERY_S)  # not those of all nodes at once
        while True:
            while self._to_write:
                await call.write(self._to_write.popleft())  # if this fails, it is still unconfirmed
            if loop.time() >= acknowledge_at_s:
                acknowledge_at_s = loop.time() + _ACKNOWLEDGE_EVERY_S
                await call.write(wire.acknowledge(self.info.role, self._last_event))
                continue
            self._wake_writer.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(acknowledge_at_s):
                    await self._wake_writer.wait()

    def _receive(self, event: common_pb2.SessionEvent) -> None:
        if event.number and not self._is_next(event.number):
            return
        kind = event.WhichOneof("event")
        if kind == "step":
            self._steps.append(event.step)
            self._deliver_steps_soon()
        elif kind == "failed":
            self._deliver_steps()
            sink = self._sinks.get(event.failed.handle)
            if sink is not None:
                sink(Failed(error_from_failure(event.failed, self.info.address)))
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

    def _deliver_steps_soon(self) -> None:
        if self._delivery is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._delivered_s + self._settings.pace.gap_s - loop.time()
        if wait_s <= 0:
            self._deliver_steps()
        else:
            self._delivery = loop.call_later(wait_s, self._deliver_steps)

    def _deliver_steps(self) -> None:
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        self._delivered_s = asyncio.get_running_loop().time()
        steps, self._steps = self._steps, []
        sinks = self._sinks
        for handle, event in events_from_steps(steps):
            sink = sinks.get(handle)
            if sink is not None:  # otherwise it has been cancelled, and this was on its way
                sink(event)

    def _heartbeat(self, heartbeat: common_pb2.Heartbeat) -> None:
        self._confirm(heartbeat.last_command)
        if heartbeat.engine_age_s > self._settings.engine_age_limit_s:
            self._lose(f"its engine has not finished a step for {heartbeat.engine_age_s:.1f} s")
            return
        load = wire.load_from_proto(heartbeat.load)
        if not self._first_load.done():
            self._first_load.set_result(load)
        self.on_heartbeat(load, heartbeat.draining)

    def _confirm(self, last_command: int) -> None:
        while self._unconfirmed and self._unconfirmed[0].number <= last_command:
            self._unconfirmed.popleft()

    # --- loss ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Counts silence in small steps, so that a pause of our own event loop is not taken for the node's."""
        while not self.is_lost:
            await asyncio.sleep(self._settings.heartbeat_timeout_s / _LOOKS)
            self._silent_s += self._settings.heartbeat_timeout_s / _LOOKS
            if self._has_opened and self._silent_s > self._settings.heartbeat_timeout_s:
                self._lose(f"silent for {self._silent_s:.1f} s ({self._trouble})")

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self._deliver_steps()
        self._lost.set_result(reason)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._unconfirmed.clear()
        self._to_write.clear()
        self.on_lost()
        for sink in list(self._sinks.values()):
            sink(Failed(self._loss()))

    def _loss(self) -> NodeUnavailable:
        return NodeUnavailable(f"{self.info.address}: {self._lost.result()}")
