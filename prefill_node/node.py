"""A prefill node: computes prompts, hands their blocks over as they are computed, and samples the first token.

    StartPrefill --> (a store has some of it? load that) --> engine: chunk, chunk, ... first token
                                                                |      |
                                                  publish <-----+------+      progress to the router after each

A request ends with its first token; its blocks stay until fetched, released, or their lease ends.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.hashing import BlockHash
from kvasir.common.metrics import Sample
from kvasir.common.tokens import num_packed
from kvasir.engine import wire
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.request import FinishReason
from kvasir.engine.step import Admitted, ComputedBlocks
from kvasir.kv_connector.base import BlockKey
from kvasir.kv_connector.incoming import IncomingTransfer
from kvasir.kv_connector.wire import ticket_from_proto
from kvasir.node.in_flight import InFlight
from kvasir.node.node import Node
from kvasir.node.outbox import Outbox
from kvasir.node.parts import NodeParts
from kvasir.node.session import Session
from kvasir.node.stored_prompts import StoredPrompts
from kvasir.prefill_node.admission import Holdings, refusal
from kvasir.prefill_node.handoff import Handoff
from kvasir.proto import common_pb2, prefill_pb2

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class PrefillRequest(InFlight):
    handoff: Handoff | None = None
    stored_keys: list[BlockKey] = field(default_factory=list)  # of leading blocks that the store has
    loading: IncomingTransfer | None = None


class PrefillNode(Node[PrefillRequest]):
    role = common_pb2.ROLE_PREFILL

    def __init__(self, parts: NodeParts, max_num_queued_tokens: int) -> None:
        self._max_num_queued_tokens = max_num_queued_tokens
        self._handoffs: dict[tuple[Session, int], Handoff] = {}
        super().__init__(parts)
        self._stored = StoredPrompts(self.receiver, parts.model.kv_identity, self.limits.block_size, self._compute_s)

    def actions(self) -> dict[str, Callable[[Session, Any], None]]:
        return {"start": self._start, "cancel": self._cancel_or_release, "release": self._release}

    @property
    def num_busy(self) -> int:
        return super().num_busy + sum(not handoff.is_done for handoff in self._handoffs.values())

    def own_samples(self) -> Iterator[Sample]:
        num_blocks = sum(handoff.num_queued_blocks for handoff in self._handoffs.values())
        yield Sample("kvasir:kv_blocks_to_publish", "Computed, and cannot be fetched yet.", num_blocks)

    def on_session_end(self, session: Session) -> None:
        """Its router can no longer say who shall fetch what has been handed off, nor let go of it."""
        super().on_session_end(session)
        for owner, handle in list(self._handoffs):
            if owner is session:
                self._let_go(session, handle)

    # --- commands --------------------------------------------------------------------------------------------------

    def _start(self, session: Session, message: prefill_pb2.StartPrefill) -> None:
        self.check_open()
        self._check_room(num_packed(message.request.prompt_token_ids))
        ticket = ticket_from_proto(message.ticket)
        if ticket.connector != self.parts.connector.name:
            raise InvalidRequest(f"the ticket is for {ticket.connector!r}, this node has {self.parts.connector.name!r}")
        entry = self.in_flight.begin(PrefillRequest, session, message.handle, message.request, hand_off=True)
        entry.handoff = Handoff(
            ticket,
            self.sender,
            self.release_blocks,
            lambda num_blocks, committed: self._tell_progress(session, message.handle, num_blocks, committed),
            self.spawn,
        )
        self._handoffs[session, message.handle] = entry.handoff
        if self.parts.connector.is_store:
            self.spawn(self._look_up_and_submit(entry))
        else:
            self.engine.submit(entry.request)

    def _check_room(self, num_tokens: int) -> None:
        stats, block_size = self.engine.stats(), self.limits.block_size
        newcomers = (entry.request.num_tokens for entry in self.in_flight if not entry.is_admitted)
        holds = Holdings(
            num_queued_tokens=stats.num_queued_tokens,
            num_newcomer_blocks=sum(num_blocks_for(one, block_size) for one in newcomers),
            num_leased_blocks=self.sender.num_leased_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_total_blocks=stats.num_total_blocks,
        )
        why_not = refusal(holds, num_tokens, num_blocks_for(num_tokens, block_size), self._max_num_queued_tokens)
        if why_not:
            raise Overloaded(why_not)

    def _cancel_or_release(self, session: Session, message: common_pb2.CancelRequest) -> None:
        self._cancel(session, message)
        if not message.HasField("sequence"):
            self._let_go(session, message.handle)

    def _release(self, session: Session, message: prefill_pb2.ReleaseTicket) -> None:
        self._let_go(session, message.handle)

    def _let_go(self, session: Session, handle: int) -> None:
        handoff = self._handoffs.pop((session, handle), None)
        if handoff is not None:
            handoff.abort()

    def _tell_progress(self, session: Session, handle: int, num_blocks: int, committed: bool) -> None:
        progress = common_pb2.TicketProgress(handle=handle, num_blocks=num_blocks, committed=committed)
        session.tell(common_pb2.StepOutput(progress=[progress]))
        if committed:
            self._forget_later(session, handle)

    def _forget_later(self, session: Session, handle: int) -> None:
        """It is the receiver's now; remembered for as long as its blocks are here."""
        handoff = self._handoffs.get((session, handle))
        if handoff is not None and not self.sender.is_leased(handoff.ticket.transfer_id):
            del self._handoffs[session, handle]
        elif handoff is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(self.parts.connector_settings.lease_s, self._forget_later, session, handle)

    # --- what the engine says --------------------------------------------------------------------------------------

    def on_admitted(self, entry: PrefillRequest, admitted: Admitted, outbox: Outbox) -> None:
        if "blocks" in admitted.request.awaits:
            self._load(entry, admitted)
        else:
            outbox.to(entry.session).admitted.append(wire.admitted_to_proto(admitted))

    def on_computed(self, entry: PrefillRequest | None, computed: ComputedBlocks) -> None:
        if entry is None or entry.handoff is None:
            self.release_blocks(computed.block_ids)
        else:
            entry.handoff.add(computed)

    def on_end(self, entry: PrefillRequest, reason: FinishReason | None) -> None:
        """Handed off, its blocks are awaited. In all other cases nobody will fetch them."""
        if entry.loading is not None:
            entry.loading.cancel()
        if reason is not FinishReason.HANDED_OFF:
            self._let_go(entry.session, entry.handle)

    # --- a store that has some of the prompt already ---------------------------------------------------------------

    async def _look_up_and_submit(self, entry: PrefillRequest) -> None:
        """Only what would have to be computed here is looked up; the last token always is."""
        try:
            request = entry.request
            keys = self._stored.keys(request, request.num_tokens)
            num_cached = self.mirror.num_leading([BlockHash(key) for key in keys])
            num_stored = await self._stored.num_leading(keys[num_cached:])
            if self.in_flight.get(entry.request_id) is not entry:
                return  # it has ended meanwhile
            if num_stored:
                entry.stored_keys = keys[: num_cached + num_stored]
                request.awaits.add("blocks")
            self.engine.submit(request)
        except Exception as error:
            log.exception("request %s could not be submitted", entry.request_id)
            if self.in_flight.get(entry.request_id) is entry:
                self.in_flight.fail(entry, error)

    def _compute_s(self, num_tokens: int) -> float | None:
        """What is queued here is computed first; fetching goes on beside it."""
        stats = self.engine.stats()
        rate = stats.prefill_tokens_per_s
        return (num_tokens + stats.num_queued_tokens) / rate if rate else None

    def _load(self, entry: PrefillRequest, admitted: Admitted) -> None:
        wanted = self._stored.wanted(admitted, entry.stored_keys)
        on_block = partial(self.engine.block_loaded, entry.request_id)
        entry.loading = self.receiver.fetch_stored(wanted, on_block, self._compute_s)
        self.spawn(self._finish_loading(entry, entry.loading, admitted))

    async def _finish_loading(self, entry: PrefillRequest, loading: IncomingTransfer, admitted: Admitted) -> None:
        """However it ends, the engine is told: until then it holds the blocks for the transfer."""
        try:
            result = await loading.done()
        finally:
            self.loading_done(entry.request_id)
        if self.in_flight.get(entry.request_id) is entry:
            told = wire.admitted_to_proto(admitted, result.num_fetched * self.limits.block_size)
            entry.session.tell(common_pb2.StepOutput(admitted=[told]))
