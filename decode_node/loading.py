"""A prompt's KV, from its request's admission on: what is not cached here is fetched, and the engine is told.

ticket ------> a transfer, which waits for what its sender publishes ---+--> landed: as if it had been cached
  |  sender lost: what others have stored                               |
no ticket ---> what a store has of it, if there is a store -------------+--> did not come: computed here
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvasir.common.hashing import block_hashes, root_hash, transfer_key
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.step import Admitted
from kvasir.kv_connector.base import BlockKey, KVBlock, Ticket
from kvasir.kv_connector.incoming import IncomingTransfer, TransferResult
from kvasir.node.in_flight import InFlight
from kvasir.node.node import Node
from kvasir.node.stored_prompts import StoredPrompts
from kvasir.proto import common_pb2

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class DecodeRequest(InFlight):
    ticket: Ticket | None = None  # None: the prompt is computed here
    transfer: IncomingTransfer | None = None  # from admission on
    num_published: int = 0  # what the sender's progress said before that
    is_committed: bool = False
    aborted_because: str | None = None
    first_missing: int = 0  # block, at admission
    admission_deadline: asyncio.TimerHandle | None = None
    fetched: set[int] = field(default_factory=set)  # full blocks that came from elsewhere

    def stop_waiting(self) -> None:
        """For its admission."""
        if self.admission_deadline is not None:
            self.admission_deadline.cancel()


class PromptLoader:
    """Of one node. However a transfer ends, the engine is told: until then it keeps the blocks for it."""

    def __init__(self, node: Node[DecodeRequest]) -> None:
        self._node = node
        self._parts = node.parts
        self._engine = node.engine
        self._receiver = node.receiver
        self._block_size = node.limits.block_size
        self._is_store = node.parts.connector.is_store
        self._stored = StoredPrompts(node.receiver, node.parts.model.kv_identity, self._block_size, self.compute_s)

    def awaits(self, ticket: Ticket | None) -> set[str]:
        """What the engine waits for before it runs a request."""
        return {"blocks", "continue"} if ticket is not None or self._is_store else {"continue"}

    def admitted(self, entry: DecodeRequest, admitted: Admitted) -> None:
        """Its blocks are reserved: fetch what is missing of them."""
        entry.first_missing = min(admitted.missing, default=len(admitted.block_table))
        if entry.ticket is not None:
            self._fetch(entry, entry.ticket, admitted)
        elif self._is_store:
            self._node.spawn(self._fetch_stored(entry, admitted))

    def progress(self, entry: DecodeRequest, num_blocks: int, committed: bool) -> None:
        """The sender has published so many; committed: that was all."""
        entry.num_published = max(entry.num_published, num_blocks)
        entry.is_committed |= committed
        if entry.transfer is not None:
            entry.transfer.progress(entry.num_published, entry.is_committed)

    def sender_lost(self, entry: DecodeRequest, reason: str) -> None:
        """It publishes nothing more. Others may have stored the same blocks."""
        entry.aborted_because = reason
        if entry.transfer is None or entry.ticket is None:
            return
        if self._is_store:
            self._node.spawn(self._look_in_store(entry, entry.transfer, entry.ticket, reason))
        else:
            entry.transfer.abort(reason)

    def ended(self, entry: DecodeRequest) -> None:
        if entry.transfer is not None:
            entry.transfer.cancel()

    def compute_s(self, num_tokens: int) -> float | None:
        """Computing them here keeps all others here waiting for their next tokens, so it counts twice.

        A node that has never computed a prompt knows at least that one token a step is slower.
        """
        stats = self._engine.stats()
        slowest_rate = 1 / stats.decode_step_s if stats.decode_step_s else 0.0
        rate = stats.prefill_tokens_per_s or slowest_rate
        return 2 * num_tokens / rate if rate else None

    # Ways in which it comes.

    def _fetch(self, entry: DecodeRequest, ticket: Ticket, admitted: Admitted) -> None:
        wanted = self._of_ticket(ticket, admitted)
        on_block = partial(self._engine.block_loaded, entry.request_id)
        entry.transfer = self._receiver.start(ticket, wanted, on_block, self.compute_s)
        if admitted.is_again:  # by who stored it, nothing is to come
            entry.transfer.progress(len(admitted.block_table), committed=True)
        else:
            entry.transfer.progress(entry.num_published, entry.is_committed)
            if entry.aborted_because is not None:
                self.sender_lost(entry, entry.aborted_because)
        self._node.spawn(self._finish(entry, entry.transfer, admitted, wanted))

    async def _fetch_stored(self, entry: DecodeRequest, admitted: Admitted) -> None:
        """For a prompt that is computed here."""
        request = entry.request
        wanted: list[KVBlock] = []
        try:
            keys = self._stored.keys(request, request.num_tokens_at_arrival)
            num_leading = entry.first_missing + await self._stored.num_leading(keys[entry.first_missing :])
            if self._node.in_flight.get(entry.request_id) is entry:
                wanted = self._stored.wanted(admitted, keys[:num_leading])
                # The rest was never elsewhere, or is there only since this node has computed it.
                request.num_awaited_tokens = min(request.num_awaited_tokens, num_leading * self._block_size)
        finally:
            if not wanted:
                self._node.loading_done(entry.request_id)
        if wanted:
            on_block = partial(self._engine.block_loaded, entry.request_id)
            entry.transfer = self._receiver.fetch_stored(wanted, on_block, self.compute_s)
            await self._finish(entry, entry.transfer, admitted, wanted)

    async def _look_in_store(
        self, entry: DecodeRequest, transfer: IncomingTransfer, ticket: Ticket, reason: str
    ) -> None:
        """Under the names by which the transfer asks for them."""
        try:
            keys = self._stored.keys(entry.request, entry.request.num_tokens_at_arrival)
            first = max(entry.num_published, entry.first_missing)
            transfer.progress(first + await self._stored.num_leading(keys[first:], ticket.stored_as))
        finally:
            transfer.abort(reason)

    def _of_ticket(self, ticket: Ticket, admitted: Admitted) -> list[KVBlock]:
        """Full blocks go by their content; the last, partial one by the ticket."""
        request, block_size = admitted.request, self._block_size
        token_ids = request.token_ids[: request.num_tokens_at_arrival]
        root = root_hash(self._parts.model.kv_identity, request.cache_salt)
        hashes = block_hashes(root, token_ids, block_size)
        wanted = []
        for index in admitted.missing:
            key = hashes[index] if index < len(hashes) else transfer_key(ticket.transfer_id, index)
            num_tokens = min(block_size, len(token_ids) - index * block_size)
            wanted.append(KVBlock(index, BlockKey(key), admitted.block_table[index], num_tokens))
        return wanted

    # Its end.

    async def _finish(
        self, entry: DecodeRequest, transfer: IncomingTransfer, admitted: Admitted, wanted: Sequence[KVBlock]
    ) -> None:
        try:
            result = await transfer.done()
            lost = set(result.missing)
            full = (block.index for block in wanted if block.num_tokens == self._block_size)
            entry.fetched.update(index for index in full if index not in lost)
            self._note_stored(entry, lost)
        finally:
            self._node.loading_done(entry.request_id)
        if self._node.in_flight.get(entry.request_id) is entry and not admitted.is_again:
            entry.session.tell(common_pb2.StepOutput(transfers=[self._report(entry, admitted, wanted, result)]))

    def _note_stored(self, entry: DecodeRequest, lost: set[int]) -> None:
        """What the engine may ask for once more, if it has to take the request's blocks away; and what that costs.

        The engine's thread reads it: of this request not before `loading_done`, and a float is always whole.
        """
        if not self._is_store:
            return  # a peer lets go of what has been fetched
        request = entry.request
        num_blocks = min(lost, default=request.num_awaited_tokens // self._block_size)
        request.num_stored_tokens = num_blocks * self._block_size
        rate = self._receiver.rates.of(self._parts.connector.name).rate
        if rate is not None:
            num_bytes = self._parts.memory.layout.bytes_per_block
            self._parts.engine.scheduler.fetch_s_per_block = num_bytes / rate.bandwidth_bytes_per_s

    def _report(
        self, entry: DecodeRequest, admitted: Admitted, wanted: Sequence[KVBlock], result: TransferResult
    ) -> common_pb2.TransferReport:
        missing = set(result.missing)
        num_recomputed = sum(block.num_tokens for block in wanted if block.index in missing)
        num_cached = num_blocks_for(admitted.num_cached_tokens, self._block_size)
        self._node.metrics.blocks_cached(num_cached)
        self._node.metrics.tokens_recomputed(num_recomputed)
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
