"""A decode node: reserves a prompt's blocks or says no, fetches its KV, and generates from the second token on.

    StartDecode --> room? --> engine: admitted, blocks reserved --> fetch what is not cached, as it is published
    ContinueDecode (first token) ----------------------------------+
                                                                   +--> all landed or given up: joins the batch

Blocks that do not come are computed here, as any other uncomputed tokens. Where there is a store, it is asked before a
prompt without a ticket is computed, and before what a lost sender has promised is.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.metrics import Sample
from kvasir.common.tokens import unpack_tokens
from kvasir.decode_node.wanted import wanted_blocks
from kvasir.decode_node.write_back import WriteBack
from kvasir.engine import wire
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.request import FinishReason
from kvasir.engine.step import Admitted, ComputedBlocks
from kvasir.kv_connector.base import BlockKey, Ticket
from kvasir.kv_connector.incoming import IncomingTransfer, TransferResult, WantedBlock
from kvasir.kv_connector.sender import OutgoingBlock
from kvasir.kv_connector.wire import ticket_from_proto
from kvasir.node.in_flight import InFlight
from kvasir.node.node import Node
from kvasir.node.outbox import Outbox
from kvasir.node.parts import NodeParts
from kvasir.node.session import Session
from kvasir.node.stored_prompts import StoredPrompts
from kvasir.proto import common_pb2, decode_pb2

log = logging.getLogger(__name__)

_PATIENCE_POLL_S = 0.05
_WRITE_BACK_SHARE = 8  # at most this part of the blocks is kept for writing, and at least this part is left free


@dataclass(eq=False, kw_only=True)
class DecodeRequest(InFlight):
    ticket: Ticket | None = None  # None: the prompt is computed here
    transfer: IncomingTransfer | None = None  # from admission on
    num_published: int = 0  # what the sender's progress said before that
    is_committed: bool = False
    aborted_because: str | None = None
    first_missing: int = 0  # block, at admission
    patience: asyncio.TimerHandle | None = None
    fetched: set[int] = field(default_factory=set)  # full blocks that came from elsewhere


class DecodeNode(Node[DecodeRequest]):
    role = common_pb2.ROLE_DECODE

    def __init__(self, parts: NodeParts, admission_timeout_s: float, *, writes_back: bool = False) -> None:
        self._admission_timeout_s = admission_timeout_s
        self._writes_back = writes_back
        super().__init__(parts)
        self._stored = StoredPrompts(self.receiver, parts.kv_identity, self.limits.block_size, self._compute_s)
        self._reserve_blocks = self.limits.num_blocks // _WRITE_BACK_SHARE
        self.write_back = WriteBack(
            self.sender, self.release_blocks, self.spawn, self._is_short_of_blocks, max(1, self._reserve_blocks)
        )

    def actions(self) -> dict[str, Callable[[Session, Any], None]]:
        return {
            "start": self._start,
            "continue_decode": self._continue,
            "progress": self._progress,
            "abort_transfer": self._abort_transfer,
        }

    # --- commands --------------------------------------------------------------------------------------------------

    def _start(self, session: Session, message: decode_pb2.StartDecode) -> None:
        self.check_open()
        self._check_room(message.request)
        ticket = self._ticket_of(message)
        awaits = {"blocks", "continue"} if ticket is not None or self.parts.connector.is_store else {"continue"}
        entry = self.in_flight.begin(DecodeRequest, session, message.handle, message.request, awaits=awaits)
        entry.ticket = ticket
        for one in entry.sequences:
            one.reports_filled = self._writes_back
        self.engine.submit(entry.request)
        self._be_patient(entry, self.engine.step, time.monotonic() + self._admission_timeout_s)

    def _ticket_of(self, message: decode_pb2.StartDecode) -> Ticket | None:
        if not message.HasField("ticket"):
            return None
        ticket = ticket_from_proto(message.ticket)
        try:
            self.receiver.check(ticket)
        except ValueError as error:
            raise InvalidRequest(f"a ticket of no use: {error}") from error
        return ticket

    def _check_room(self, message: common_pb2.GenerationRequest) -> None:
        """Say no at once where waiting would be in vain: by the last step's numbers, and what was accepted since."""
        stats, block_size = self.engine.stats(), self.limits.block_size
        newcomers = [entry.request.num_tokens for entry in self.in_flight if not entry.is_admitted]
        newcomers.append((len(message.prompt_token_ids) + sum(map(len, message.output_token_ids))) // 4)
        seats = [len(entry.sequences) for entry in self.in_flight if not entry.is_admitted]
        seats.append(min(max(message.num_sequences, 1), self.limits.max_num_seqs))  # more than there are take turns
        if stats.num_running + stats.num_loading + sum(seats) > self.limits.max_num_seqs:
            raise Overloaded(f"all {self.limits.max_num_seqs} seats are taken or promised")
        num_wanted = sum(num_blocks_for(num_tokens, block_size) for num_tokens in newcomers)
        if num_wanted > stats.num_free_blocks and stats.num_free_blocks < stats.num_total_blocks:
            raise Overloaded(f"newcomers want {num_wanted} blocks, {stats.num_free_blocks} are free")

    def _be_patient(self, entry: DecodeRequest, step: int, deadline_s: float) -> None:
        """Where that was too hopeful: say no if the engine has scheduled since `step` and not admitted it."""
        if entry.is_admitted:
            return
        num_steps = self.engine.step - step
        had_its_chance = num_steps >= 2 or (num_steps == 1 and self.engine.age_s == 0)
        if had_its_chance or time.monotonic() >= deadline_s:
            self.in_flight.fail(entry, Overloaded("no room for it now"))
            return
        loop = asyncio.get_running_loop()
        entry.patience = loop.call_later(_PATIENCE_POLL_S, self._be_patient, entry, step, deadline_s)

    def _continue(self, session: Session, message: decode_pb2.ContinueDecode) -> None:
        entry = self.in_flight.find(session, message.handle)
        if entry is None:
            return  # it has ended meanwhile
        first = {one.sequence: unpack_tokens(one.token_ids) for one in message.first}
        if first and max(first) >= len(entry.sequences):
            raise InvalidRequest(f"the request has {len(entry.sequences)} sequences, none with index {max(first)}")
        highest = max((token_id for token_ids in first.values() for token_id in token_ids), default=0)
        if highest >= self.parts.vocab_size:
            raise InvalidRequest(f"token id {highest} is outside of the vocabulary")
        for sequence in reversed(range(len(entry.sequences))):  # the one that leads them is the last to go on
            self.engine.continue_with(entry.sequences[sequence].request_id, first.get(sequence, ()))

    def _progress(self, session: Session, message: decode_pb2.ReportProgress) -> None:
        entry = self.in_flight.find(session, message.progress.handle)
        if entry is None:
            return
        entry.num_published = max(entry.num_published, message.progress.num_blocks)
        entry.is_committed |= message.progress.committed
        if entry.transfer is not None:
            entry.transfer.progress(entry.num_published, entry.is_committed)

    def _abort_transfer(self, session: Session, message: decode_pb2.AbortTransfer) -> None:
        entry = self.in_flight.find(session, message.handle)
        if entry is None:
            return
        entry.aborted_because = message.reason or "the sender is gone"
        if entry.transfer is not None:
            self._no_more_promises(entry, entry.transfer, entry.aborted_because)

    # --- what the engine says --------------------------------------------------------------------------------------

    def on_admitted(self, entry: DecodeRequest, admitted: Admitted, outbox: Outbox) -> None:
        if entry.patience is not None:
            entry.patience.cancel()
        if not admitted.is_again:
            outbox.to(entry.session).admitted.append(wire.admitted_to_proto(admitted))
        entry.first_missing = min(admitted.missing, default=len(admitted.block_table))
        if entry.ticket is None:
            if self.parts.connector.is_store:
                self.spawn(self._fetch_stored(entry, admitted))
            return
        wanted = wanted_blocks(entry.ticket, admitted, self.parts.kv_identity, self.limits.block_size)
        on_block = partial(self.engine.block_loaded, entry.request_id)
        entry.transfer = self.receiver.start(entry.ticket, wanted, on_block, self._compute_s)
        if admitted.is_again:  # by who stored it, nothing is to come
            entry.transfer.progress(len(admitted.block_table), committed=True)
        else:
            entry.transfer.progress(entry.num_published, entry.is_committed)
            if entry.aborted_because is not None:
                self._no_more_promises(entry, entry.transfer, entry.aborted_because)
        self.spawn(self._finish_transfer(entry, entry.transfer, admitted, wanted))

    def on_computed(self, entry: DecodeRequest | None, computed: ComputedBlocks) -> None:
        """What was filled here is offered to the store: exact blocks that did not come from elsewhere."""
        own, others = [], []
        for i, (block_id, block_hash) in enumerate(zip(computed.block_ids, computed.hashes, strict=True)):
            index = computed.first_index + i
            is_leader = entry is not None and entry.request_id == computed.request_id
            if entry is None or block_hash is None or (is_leader and index in entry.fetched):
                others.append(block_id)
            else:
                own.append(OutgoingBlock(index, BlockKey(block_hash), block_id, computed.num_tokens[i]))
        if others:
            self.release_blocks(others)
        self.write_back.add(own)

    def on_end(self, entry: DecodeRequest, reason: FinishReason | None) -> None:
        if entry.patience is not None:
            entry.patience.cancel()
        if entry.transfer is not None:
            entry.transfer.cancel()

    @property
    def num_busy(self) -> int:
        return super().num_busy + self.write_back.num_waiting

    def own_samples(self) -> Iterator[Sample]:
        yield Sample("kvasir:kv_blocks_to_write_back", "Filled here, to be written.", self.write_back.num_waiting)

    async def close(self) -> None:
        self.write_back.close()
        await super().close()

    def _is_short_of_blocks(self) -> bool:
        return self.engine.stats().num_free_blocks <= self._reserve_blocks

    # --- the prompt's KV -------------------------------------------------------------------------------------------

    def _compute_s(self, num_tokens: int) -> float | None:
        """Computing them here keeps all others here waiting for their next tokens, so it counts twice.

        A node that has never computed a prompt knows at least that one token a step is slower.
        """
        stats = self.engine.stats()
        slowest_rate = 1 / stats.decode_step_s if stats.decode_step_s else 0.0
        rate = stats.prefill_tokens_per_s or slowest_rate
        return 2 * num_tokens / rate if rate else None

    async def _fetch_stored(self, entry: DecodeRequest, admitted: Admitted) -> None:
        """For a prompt that is computed here. However it ends, the engine is told."""
        request = entry.request
        wanted: list[WantedBlock] = []
        try:
            keys = self._stored.keys(request, request.num_tokens_at_arrival)
            num_leading = entry.first_missing + await self._stored.num_leading(keys[entry.first_missing :])
            if self.in_flight.get(entry.request_id) is entry:
                wanted = self._stored.wanted(admitted, keys[:num_leading])
                request.num_awaited_tokens = num_leading * self.limits.block_size  # the rest was never elsewhere
        finally:
            if not wanted:
                self.loading_done(entry.request_id)
        if wanted:
            on_block = partial(self.engine.block_loaded, entry.request_id)
            entry.transfer = self.receiver.fetch_stored(wanted, on_block, self._compute_s)
            await self._finish_transfer(entry, entry.transfer, admitted, wanted)

    def _no_more_promises(self, entry: DecodeRequest, transfer: IncomingTransfer, reason: str) -> None:
        """The sender is gone. Others may have stored the same blocks."""

        async def look_in_store() -> None:
            try:
                keys = self._stored.keys(entry.request, entry.request.num_tokens_at_arrival)
                first = max(entry.num_published, entry.first_missing)
                transfer.progress(first + await self._stored.num_leading(keys[first:]))
            finally:
                transfer.abort(reason)

        if self.parts.connector.is_store:
            self.spawn(look_in_store())
        else:
            transfer.abort(reason)

    async def _finish_transfer(
        self, entry: DecodeRequest, transfer: IncomingTransfer, admitted: Admitted, wanted: list[WantedBlock]
    ) -> None:
        """However it ends, the engine is told: until then it holds the blocks for the transfer."""
        try:
            result = await transfer.done()
            lost = set(result.missing)
            full = (block.index for block in wanted if block.num_tokens == self.limits.block_size)
            entry.fetched.update(index for index in full if index not in lost)
            self._note_stored(entry, lost)
        finally:
            self.loading_done(entry.request_id)
        if self.in_flight.get(entry.request_id) is not entry or admitted.is_again:
            return
        entry.session.tell(common_pb2.StepOutput(transfers=[self._report(entry, admitted, wanted, result)]))

    def _note_stored(self, entry: DecodeRequest, lost: set[int]) -> None:
        """What the engine may ask for once more, if it has to take the request's blocks away; and what that costs.

        The engine's thread reads it: of this request not before `loading_done`, and a float is always whole.
        """
        if not self.parts.connector.is_store:
            return  # a peer lets go of what has been fetched
        block_size = self.limits.block_size
        request = entry.request
        num_blocks = min(lost, default=request.num_awaited_tokens // block_size)
        request.num_stored_tokens = num_blocks * block_size
        rate = self.receiver.rates.of(self.parts.connector.name).rate
        if rate is not None:
            num_bytes = self.parts.memory.layout.bytes_per_block
            self.parts.engine.scheduler.fetch_s_per_block = num_bytes / rate.bandwidth_bytes_per_s

    def _report(
        self, entry: DecodeRequest, admitted: Admitted, wanted: list[WantedBlock], result: TransferResult
    ) -> common_pb2.TransferReport:
        missing = set(result.missing)
        num_recomputed = sum(block.num_tokens for block in wanted if block.index in missing)
        num_cached = num_blocks_for(admitted.num_cached_tokens, self.limits.block_size)
        self.metrics.blocks_cached(num_cached)
        self.metrics.tokens_recomputed(num_recomputed)
        if missing:
            log.info("request %s: %d of %d blocks did not come", entry.request_id, len(missing), len(wanted))
        return common_pb2.TransferReport(
            handle=entry.handle,
            num_blocks_fetched=result.num_fetched,
            num_blocks_cached=num_cached,
            num_tokens_recomputed=num_recomputed,
            transfer_s=result.transfer_s,
            overlapped_s=result.overlapped_s,
            num_bytes=result.num_bytes,
        )
