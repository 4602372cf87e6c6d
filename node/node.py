"""What prefill and decode nodes have in common: sessions, requests and their ends, results to events, draining.

router --commands--> handle --> begin, submit --> engine thread
router <--events---- session <-- one StepOutput a session and step <-- results
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic

from kvasir.common.errors import Draining, EngineDead, ServingError
from kvasir.common.metrics import Sample
from kvasir.engine import wire
from kvasir.engine.addresses import address_of
from kvasir.engine.async_engine import AsyncEngine
from kvasir.engine.blocks import BlockId
from kvasir.engine.request import FinishReason, RequestId
from kvasir.engine.step import Admitted, ComputedBlocks, SequenceOutput, StepResult
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.receiver import KVReceiver
from kvasir.kv_connector.sender import KVSender
from kvasir.node.gauges import engine_samples, process_samples, transfer_samples
from kvasir.node.in_flight import E, InFlightRequests
from kvasir.node.kv_feed import KVMirror
from kvasir.node.outbox import Outbox
from kvasir.node.parts import NodeParts
from kvasir.node.session import Session, Sessions
from kvasir.proto import common_pb2

log = logging.getLogger(__name__)

_TICK_S = 0.25
_DRAIN_POLL_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


class Node(ABC, Generic[E]):
    """All methods belong to the event loop on which `start` was called."""

    role: ClassVar["common_pb2.Role.ValueType"]

    def __init__(self, parts: NodeParts) -> None:
        self.parts = parts
        self.epoch = parts.epoch
        self.limits = parts.engine.scheduler.limits
        self.mirror = KVMirror()
        self.sessions = Sessions(self.mirror, self.on_session_end)
        self.is_draining = False
        self.crashed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.metrics = parts.metrics
        self.engine = AsyncEngine(parts.engine, on_result=self._on_result, on_crash=self._on_crash)
        self.in_flight: InFlightRequests[E] = InFlightRequests(
            self.engine, parts.engine.check_fits, self.metrics, parts.model.vocab_size, self.on_end
        )
        self.transfer_metrics = TransferMetrics()
        settings, metrics = parts.connector_settings, self.transfer_metrics
        shared = (parts.connector, parts.memory, parts.model.kv_identity)
        self.sender = KVSender(*shared, self.epoch, self.release_blocks, settings, metrics=metrics)
        self.receiver = KVReceiver(*shared, settings, metrics=metrics)
        parts.engine.on_step = self.metrics.stepped
        self.metrics.metrics.sampled(self._samples)
        self._actions: dict[str, Callable[[Session, Any], None]] = {
            "snapshot": self._snapshot,
            "cancel": self._cancel,
            **self.actions(),
        }
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what a kind of node does differently ----------------------------------------------------------------------

    @abstractmethod
    def actions(self) -> dict[str, Callable[[Session, Any], None]]:
        """Its own commands, by their names in the oneof. They may raise ServingError: that fails the request."""

    @abstractmethod
    def on_admitted(self, entry: E, admitted: Admitted, outbox: Outbox) -> None: ...

    def on_passed_over(self, entry: E) -> None:
        """The engine has considered it once, and it must wait; which is as it should be, where there is a queue."""

    @abstractmethod
    def on_computed(self, entry: E | None, computed: ComputedBlocks) -> None:
        """Each block has a reference, which must be released. `entry` is None if the request has ended meanwhile."""

    @abstractmethod
    def on_end(self, entry: E, reason: FinishReason | None) -> None:
        """The request has left `in_flight`. Without a reason: failed or cancelled."""

    def own_samples(self) -> Iterator[Sample]:
        """For /metrics, beside what all kinds of nodes show."""
        yield from ()

    @property
    def num_busy(self) -> int:
        """What a drain waits for: requests, blocks that somebody may still fetch, news on their way."""
        return len(self.in_flight) + self.sender.num_leased_blocks + self.sessions.num_listening

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.engine.start()
        try:
            await self.sender.start()
        except BaseException:
            await self.engine.close()
            raise
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Cancel what is left, then stop in reverse. Raises AssertionError if a block has been lost or lent twice."""
        if self._ticker is not None:
            self._ticker.cancel()
        for session in self.sessions:
            self.sessions.end(session)
        await self.receiver.close()
        if self._tasks:  # nothing is left for them to wait for
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        await self.sender.close()
        with suppress(EngineDead):
            await self.engine.call(lambda engine: engine.check_invariants())
        await self.engine.close()

    def drain(self) -> None:
        """Take nothing new from now on."""
        if not self.is_draining:
            log.info("draining: %d requests in flight", len(self.in_flight))
        self.is_draining = True

    async def drained(self) -> None:
        while self.num_busy:  # noqa: ASYNC110  # leases end with time, and tell nobody
            await asyncio.sleep(_DRAIN_POLL_S)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.sessions.expire()

    # --- commands --------------------------------------------------------------------------------------------------

    def handle(self, session: Session, command: Any) -> None:
        """Nothing that a router sends may hurt anybody but its own request."""
        kind = command.WhichOneof("command")
        action = self._actions.get(kind)
        if action is None:
            log.warning("session %s: no command %r here", session.session_id, kind)
            return
        message = getattr(command, kind)
        try:
            action(session, message)
        except Exception as error:
            if not isinstance(error, ServingError):
                log.exception("command %s failed", kind)
            if hasattr(message, "handle"):
                self.in_flight.refuse(session, message.handle, error)

    def check_open(self) -> None:
        if self.is_draining:
            raise Draining("this node is draining")

    def on_session_end(self, session: Session) -> None:
        num_cancelled = self.in_flight.cancel_all_of(session)
        log.info("session %s has ended; %d of its requests are cancelled", session.session_id, num_cancelled)

    def _snapshot(self, session: Session, _: Any) -> None:
        session.tell_all_cached()

    def _cancel(self, session: Session, message: common_pb2.CancelRequest) -> None:
        entry = self.in_flight.find(session, message.handle)
        if entry is None:
            return
        if message.HasField("sequence"):
            self.in_flight.cancel_sequence(entry, message.sequence)
        else:
            self.in_flight.cancel(entry)

    # --- results ---------------------------------------------------------------------------------------------------

    def _on_result(self, result: StepResult) -> None:
        outbox = Outbox(result.step)
        for admitted in result.admitted:
            self._on_admitted(admitted, outbox)
        for request_id in result.passed_over:
            entry = self.in_flight.get(request_id)
            if entry is not None:
                self.on_passed_over(entry)
        for computed in result.computed:
            self.on_computed(self.in_flight.get(computed.request_id), computed)
        for scored in result.prompt_logprobs:
            entry = self.in_flight.get(scored.request_id)
            if entry is not None:
                outbox.to(entry.session).prompt_logprobs.append(wire.prompt_logprobs_to_proto(scored))
        for output in result.outputs:
            self._on_output(output, outbox)
        for failed in result.failed:
            entry = self.in_flight.get(failed.request_id)
            if entry is not None:
                self.in_flight.fail(entry, failed.error)
        outbox.send()
        if result.stored or result.dropped:
            self.mirror.apply(result.stored, result.dropped)
            for session in self.sessions:
                session.tell_cached(result.stored, result.dropped)

    def _on_admitted(self, admitted: Admitted, outbox: Outbox) -> None:
        entry = self.in_flight.get(admitted.request.request_id)
        if entry is None:  # cancelled while it waited: no transfer will ever touch its blocks
            self.loading_done(admitted.request.request_id)
            return
        entry.is_admitted = True
        if not admitted.is_again:
            self.metrics.admitted(entry.progress, admitted)
        self.on_admitted(entry, admitted, outbox)

    def _on_output(self, output: SequenceOutput, outbox: Outbox) -> None:
        entry = self.in_flight.get(output.request_id)
        sequence = address_of(output.request_id).sequence
        if entry is None or sequence not in entry.open_sequences:
            return
        self.metrics.generated(entry.progress[sequence], output)
        outbox.to(entry.session).outputs.append(wire.output_to_proto(output))
        if output.finish_reason is not None:
            self.in_flight.finish(entry, sequence, output.finish_reason)

    def _on_crash(self, error: Exception) -> None:
        for entry in self.in_flight:
            self.in_flight.fail(entry, EngineDead(f"the engine has crashed: {error}"))
        self.crashed.set_result(error)

    def loading_done(self, request_id: RequestId) -> None:
        with suppress(EngineDead):
            self.engine.loading_done(request_id)

    def release_blocks(self, block_ids: Sequence[BlockId]) -> None:
        with suppress(EngineDead):
            self.engine.release_blocks(block_ids)

    # --- what others ask -------------------------------------------------------------------------------------------

    def heartbeat(self, session: Session) -> common_pb2.Heartbeat:
        return common_pb2.Heartbeat(
            engine_step=self.engine.step,
            engine_age_s=self.engine.age_s,
            load=wire.load_to_proto(
                self.engine.stats(), self.sender.num_leased_blocks, self.receiver.rates.mean_block_s
            ),
            draining=self.is_draining,
            last_command=session.last_command,
        )

    def _samples(self) -> Iterator[Sample]:
        yield from engine_samples(self.engine.stats(), self.engine.age_s)
        connector = self.parts.connector.name
        yield from transfer_samples(connector, self.transfer_metrics, self.sender, self.receiver)
        yield from process_samples(len(self.sessions), len(self.in_flight))
        yield from self.own_samples()
