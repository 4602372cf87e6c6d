"""One try to go on with a request: a decode node, and before it, where it is worth the trip, a prefill node.

    room found --> both started --> first token from the prefill node --> decode node continues --> tokens ... the end
                   (one ticket)     (it ends here if that token ends it)

An attempt begins with the output tokens so far, so a new request, a retry and a migration are the same thing. What it
can mend itself it mends: the decode node says no, or is lost before it spoke (another one takes the same ticket); the
prefill node is lost (the decode node computes what has not come). For the rest it raises `TryAgain`.

Several sequences have one prefill, one ticket and one handle, in an attempt that begins before any of them has tokens.
"""

import uuid
from collections.abc import Callable
from functools import partial
from typing import cast

from kvasir.common.errors import DeadlineExceeded, Draining, InvalidRequest, NumericalError, Overloaded, ServingError
from kvasir.router import wire
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.handover import FirstTokens, Handover
from kvasir.router.leg import Leg
from kvasir.router.life import Life, Mark
from kvasir.router.node_events import Admitted, Event, Failed, Progress, PromptLogprobs, Tokens, Transferred
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue, Entry, Placement
from kvasir.router.types import PositionLogprobs, TokenDelta

_REQUESTS_OWN_FAULT = (InvalidRequest, NumericalError, DeadlineExceeded)

Heard = Event | Placement | ServingError | None  # None: look again whether anything is open


class TryAgain(Exception):
    """This attempt is over; another one may succeed."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(str(error))
        self.error = error


class Attempt:
    """`hear` is told what there is to act on, for whoever then calls `act_on`: a node's words, or room."""

    __slots__ = (
        "_decode",
        "_decode_has_spoken",
        "_entry",
        "_first",
        "_handover",
        "_has_second",
        "_hear",
        "_life",
        "_metrics",
        "_num_cached_on_decode",
        "_outputs_before",
        "_pool",
        "_prefill",
        "_prompt_logprobs",
        "_queue",
    )

    def __init__(
        self,
        life: Life,
        queue: AdmissionQueue,
        pool: NodePool,
        metrics: DispatchMetrics,
        hear: Callable[["Attempt", Leg | None, Heard], None],
    ) -> None:
        self._life = life
        self._queue = queue
        self._pool = pool
        self._metrics = metrics
        self._hear: Callable[[Leg | None, Heard], None] = partial(hear, self)
        self._entry: Entry | None = None
        self._outputs_before = tuple(life.outputs[0])
        self._prefill: Leg | None = None
        self._handover: Handover | None = None  # None: the decode node computes the prompt, or has all of it
        self._decode: Leg | None = None
        self._first: FirstTokens | None = None  # what the decode node continues with, when known
        self._num_cached_on_decode = 0
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._decode_has_spoken = False
        self._has_second = False  # of the tokens since the request's beginning
        self._wait_for_room(wants_prefill=True)

    def stop(self, client_sequence: int) -> None:
        """Its reader wants no more of it. Fine for one that is none of these, or has ended."""
        sequence = self._life.stop(client_sequence)
        if sequence is None:
            return
        if self._decode is not None and self._first is not None:  # else when the others are continued
            self._decode.send(wire.cancel(Role.DECODE, self._decode.handle, sequence))
        self._hear(None, None)

    def close(self) -> None:
        """Nothing of it stays anywhere: not in the queue, not on a node."""
        if self._entry is not None:
            self._queue.leave(self._entry)
        # They lead back here, and nothing must wait for garbage collection.
        self._entry, self._hear = None, lambda source, event: None
        for leg in (self._prefill, self._decode):
            if leg is not None:
                leg.close()

    def act_on(self, source: Leg | None, event: Heard) -> TokenDelta | None:
        """The tokens in it. Raises `TryAgain`, and what ends the request."""
        if source is not None:
            if source is self._decode:
                if type(event) is Tokens:
                    return self._next_tokens(source, event)
                self._decode_says(source, cast(Event, event))
            elif source is self._prefill and self._handover is not None:
                return self._prefill_says(source, self._handover, cast(Event, event))
            return None  # else the last words of a leg that has been closed
        if isinstance(event, Placement):
            self._start(event)
        elif isinstance(event, ServingError):
            raise event  # no room will come
        return None

    # --- room and start --------------------------------------------------------------------------------------------

    def _wait_for_room(self, *, wants_prefill: bool) -> None:
        connector = self._handover.ticket.connector if self._handover is not None else None
        need = self._life.need(wants_prefill=wants_prefill, connector=connector)
        self._entry = Entry(self._life.turn, need, partial(self._hear, None))
        self._queue.join(self._entry)

    def _start(self, placement: Placement) -> None:
        self._entry = None  # with it goes what was computed of its prompt to find room
        self._life.mark(Mark.DISPATCHED)
        request = wire.request_to_proto(self._life.request, self._outputs_before, self._life.remaining_s)
        if self._life.has_begun:
            request.sampling.ClearField("prompt_logprobs")  # they have been told
        if placement.prefill is not None:
            self._prefill = Leg(placement.prefill, self._hear)
            new_ticket = wire.ticket_to(self._prefill.node.info, transfer_id=uuid.uuid4().hex)
            self._handover = Handover(new_ticket, self._life.request.num_sequences)
            self._prefill.send(wire.start_prefill(self._prefill.handle, request, new_ticket))
            self._metrics.attempts(prefill="remote")
        elif self._handover is None:
            self._first = ((),)
            self._metrics.attempts(prefill="local")
            self._metrics.local_prefills(reason=placement.why_local)
        decode = self._decode = Leg(placement.decode, self._hear)
        ticket, progress = (None, None) if self._handover is None else (self._handover.ticket, self._handover.progress)
        decode.send(wire.start_decode(decode.handle, request, ticket))
        if progress is not None:
            decode.send(wire.report_progress(decode.handle, progress))
        if self._first is not None:
            self._continue_with(self._first)

    # --- prefill node ----------------------------------------------------------------------------------------------

    def _prefill_says(self, prefill: Leg, handover: Handover, event: Event) -> TokenDelta | None:
        match event:
            case Tokens():
                return self._take_first(prefill, handover, event)
            case Admitted():
                handover.num_cached_tokens = event.num_cached_tokens + event.num_fetched_tokens
                self._admitted(prefill, event, handover.num_cached_tokens)
            case Progress():
                handover.progress = event
                num_computed = event.num_blocks * prefill.node.info.block_size
                prefill.reservation.queued_at_most(self._life.num_tokens - num_computed)
                if self._decode is not None:
                    self._decode.send(wire.report_progress(self._decode.handle, event))
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case Failed():
                self._prefill_failed(prefill, handover, event.error)
            case Transferred():
                pass  # what it fetched for itself
        return None

    def _take_first(self, prefill: Leg, handover: Handover, tokens: Tokens) -> TokenDelta | None:
        """The decode node goes on when the first tokens of all sequences are here: they come from one step."""
        handover.first_tokens[tokens.sequence] = tokens.token_ids
        if tokens.finish_reason == "handed_off":
            tokens = tokens._replace(finish_reason=None)
        delta = self._life.take(tokens, prefill.address, self._prompt_logprobs, handover.num_cached_tokens)
        first = handover.all_first
        if first is not None:
            prefill.has_ended = True
            prefill.reservation.release()
            if self._life.open:
                self._continue_with(first)
            self._end_handover_if_done(handover)
        return delta

    def _prefill_failed(self, prefill: Leg, handover: Handover, error: ServingError) -> None:
        self._let_go(prefill, error)
        self._prefill = None
        if self._decode is None or (self._first is None and not self._can_do_without(prefill, handover)):
            raise TryAgain(error)
        if self._first is None:
            self._count_failure(error)
        elif handover.outlives_sender:
            return
        # No further block will come: the decode node keeps what has landed, and computes the rest.
        self._decode.send(wire.abort_transfer(self._decode.handle, str(error)))
        self._handover = None
        if self._first is None:
            self._continue_with(((),))

    def _can_do_without(self, prefill: Leg, handover: Handover) -> bool:
        """Nothing has been said yet that only a prefill node could go on with, and there is no other one."""
        wants_scores = self._life.request.sampling.prompt_logprobs is not None
        need = self._life.need(wants_prefill=True)
        return not (handover.first_tokens or wants_scores or self._pool.can_prefill_elsewhere(need, prefill.node))

    def _end_handover_if_done(self, handover: Handover) -> None:
        """The ticket has served when the blocks are over there and the first tokens are here."""
        if self._prefill is not None and self._prefill.has_ended and handover.is_fetched:
            self._prefill.close()
            self._prefill = self._handover = None

    # --- decode node -----------------------------------------------------------------------------------------------

    def _decode_says(self, decode: Leg, event: Event) -> None:
        match event:
            case Admitted():
                self._admitted(decode, event, event.num_cached_tokens)
                self._num_cached_on_decode = event.num_cached_tokens
                if self._handover is None:
                    self._num_cached_on_decode += event.num_fetched_tokens
            case Transferred():
                self._metrics.transferred(event)
                if self._handover is not None:
                    self._handover.is_fetched = True
                    self._end_handover_if_done(self._handover)
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case Failed():
                self._decode_failed(decode, event.error)
            case Progress():
                pass  # of a ticket of its own, which nobody here asked for

    def _next_tokens(self, decode: Leg, tokens: Tokens) -> TokenDelta | None:
        life = self._life
        self._decode_has_spoken = True
        if not self._has_second and life.has_begun:
            self._has_second = True
            life.mark(Mark.DECODE_START)
        delta = life.take(tokens, decode.address, self._prompt_logprobs, self._num_cached_on_decode)
        decode.has_ended = not life.open
        decode.reservation.holds(life.num_tokens)
        return delta

    def _decode_failed(self, decode: Leg, error: ServingError) -> None:
        self._let_go(decode, error)
        self._decode = None
        if self._handover is None or self._decode_has_spoken:
            raise TryAgain(error)
        self._count_failure(error)
        self._handover.is_fetched = False
        self._wait_for_room(wants_prefill=False)  # the prefill goes on, whoever will take its blocks

    def _continue_with(self, first: FirstTokens) -> None:
        """Also those that their first token has ended, or their reader: what others need is where they are."""
        self._first = first
        if self._decode is not None:
            self._decode.send(wire.continue_decode(self._decode.handle, first))
            for sequence in range(self._life.request.num_sequences):
                if sequence not in self._life.open:
                    self._decode.send(wire.cancel(Role.DECODE, self._decode.handle, sequence))

    # --- either ----------------------------------------------------------------------------------------------------

    def _admitted(self, leg: Leg, event: Admitted, num_tokens_there: int) -> None:
        """The node has begun with it, and need not compute so many of its tokens."""
        leg.reservation.is_admitted = True
        self._metrics.admitted(leg.reservation, event.num_cached_tokens)
        leg.reservation.queued_at_most(self._life.num_tokens - num_tokens_there)

    def _count_failure(self, error: ServingError) -> None:
        self._metrics.retries(reason=type(error).__name__)
        self._life.note_failure(error)

    def _let_go(self, leg: Leg, error: ServingError) -> None:
        leg.has_ended = True
        if isinstance(error, Overloaded):  # before its seat is free for the next in the line
            leg.node.refused(is_draining=isinstance(error, Draining))
        leg.close()
        if isinstance(error, _REQUESTS_OWN_FAULT):
            raise error
