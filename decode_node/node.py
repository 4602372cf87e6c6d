"""A decode node: reserves a prompt's blocks or says no, fetches its KV, and generates from the second token on.

    StartDecode --> room? --> engine: admitted, blocks reserved --> fetch what is not cached, as it is published
    ContinueDecode (first token) ----------------------------------+
                                                                   +--> all landed or given up: joins the batch

Blocks that do not come are computed here, as any other uncomputed tokens. Where there is a store, it is asked before a
prompt without a ticket is computed, and before what a lost sender has promised is.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.metrics import Sample
from kvasir.common.tokens import num_packed, unpack_tokens
from kvasir.decode_node.loading import DecodeRequest, PromptLoader
from kvasir.decode_node.write_back import WriteBack
from kvasir.engine import wire
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.request import FinishReason
from kvasir.engine.step import Admitted, ComputedBlocks
from kvasir.kv_connector.base import BlockKey, KVBlock
from kvasir.kv_connector.wire import ticket_from_proto
from kvasir.node.node import Node
from kvasir.node.outbox import Outbox
from kvasir.node.parts import NodeParts
from kvasir.node.session import Session
from kvasir.proto import common_pb2, decode_pb2

_WRITE_BACK_SHARE = 8  # at most this part of the blocks is kept for writing, and at least this part is left free


class DecodeNode(Node[DecodeRequest]):
    role = common_pb2.ROLE_DECODE

    def __init__(self, parts: NodeParts, admission_timeout_s: float, *, writes_back: bool = False) -> None:
        self._admission_timeout_s = admission_timeout_s
        self._writes_back = writes_back
        super().__init__(parts)
        self.loader = PromptLoader(self)
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
        ticket = ticket_from_proto(message.ticket) if message.HasField("ticket") else None
        awaits = self.loader.awaits(ticket)
        entry = self.in_flight.begin(DecodeRequest, session, message.handle, message.request, awaits=awaits)
        entry.ticket = ticket
        for one in entry.sequences:
            one.reports_filled = self._writes_back
        self.engine.submit(entry.request)
        loop = asyncio.get_running_loop()
        entry.admission_deadline = loop.call_later(self._admission_timeout_s, self.on_passed_over, entry)

    def _check_room(self, message: common_pb2.GenerationRequest) -> None:
        """Say no at once where waiting would be in vain: by the last step's numbers, and what was accepted since."""
        stats, block_size = self.engine.stats(), self.limits.block_size
        newcomers = [entry.request.num_tokens for entry in self.in_flight if not entry.is_admitted]
        newcomers.append(num_packed(message.prompt_token_ids) + sum(map(num_packed, message.output_token_ids)))
        seats = [len(entry.sequences) for entry in self.in_flight if not entry.is_admitted]
        seats.append(min(max(message.num_sequences, 1), self.limits.max_num_seqs))  # more than there are take turns
        if stats.num_running + stats.num_loading + sum(seats) > self.limits.max_num_seqs:
            raise Overloaded(f"all {self.limits.max_num_seqs} seats are taken or promised")
        num_wanted = sum(num_blocks_for(num_tokens, block_size) for num_tokens in newcomers)
        if num_wanted > stats.num_free_blocks and stats.num_free_blocks < stats.num_total_blocks:
            raise Overloaded(f"newcomers want {num_wanted} blocks, {stats.num_free_blocks} are free")

    def _continue(self, session: Session, message: decode_pb2.ContinueDecode) -> None:
        entry = self.in_flight.find(session, message.handle)
        if entry is None:
            return  # it has ended meanwhile
        first = {one.sequence: unpack_tokens(one.token_ids) for one in message.first}
        if first and max(first) >= len(entry.sequences):
            raise InvalidRequest(f"the request has {len(entry.sequences)} sequences, none with index {max(first)}")
        highest = max((token_id for token_ids in first.values() for token_id in token_ids), default=0)
        if highest >= self.parts.model.vocab_size:
            raise InvalidRequest(f"token id {highest} is outside of the vocabulary")
        for sequence in reversed(range(len(entry.sequences))):  # the one that leads them is the last to go on
            self.engine.continue_with(entry.sequences[sequence].request_id, first.get(sequence, ()))

    def _progress(self, session: Session, message: decode_pb2.ReportProgress) -> None:
        entry = self.in_flight.find(session, message.progress.handle)
        if entry is None:
            return
        self.loader.progress(entry, message.progress.num_blocks, message.progress.committed)

    def _abort_transfer(self, session: Session, message: decode_pb2.AbortTransfer) -> None:
        entry = self.in_flight.find(session, message.handle)
        if entry is None:
            return
        self.loader.sender_lost(entry, message.reason or "the sender is gone")

    # --- what the engine says --------------------------------------------------------------------------------------

    def on_passed_over(self, entry: DecodeRequest) -> None:
        """Where `_check_room` was too hopeful; or the engine has not come to it in time."""
        self.in_flight.fail(entry, Overloaded("no room for it now"))

    def on_admitted(self, entry: DecodeRequest, admitted: Admitted, outbox: Outbox) -> None:
        entry.stop_waiting()
        if not admitted.is_again:
            outbox.to(entry.session).admitted.append(wire.admitted_to_proto(admitted))
        self.loader.admitted(entry, admitted)

    def on_computed(self, entry: DecodeRequest | None, computed: ComputedBlocks) -> None:
        """What was filled here is offered to the store: exact blocks that did not come from elsewhere."""
        own, others = [], []
        for i, (block_id, block_hash) in enumerate(zip(computed.block_ids, computed.hashes, strict=True)):
            index = computed.first_index + i
            is_leader = entry is not None and entry.request_id == computed.request_id
            if entry is None or block_hash is None or (is_leader and index in entry.fetched):
                others.append(block_id)
            else:
                own.append(KVBlock(index, BlockKey(block_hash), block_id, computed.num_tokens[i]))
        if others:
            self.release_blocks(others)
        self.write_back.add(own)

    def on_end(self, entry: DecodeRequest, reason: FinishReason | None) -> None:
        entry.stop_waiting()
        self.loader.ended(entry)

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
