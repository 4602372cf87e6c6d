"""One try to go on with a request: a decode node, and before it, where it is worth the trip, a prefill node.

    room found --> both started --> first token from the prefill node --> decode node continues --> tokens ... the end
                   (one ticket)     (it ends here if that token ends it)

An attempt begins with the output tokens so far, so a new request, a retry and a migration are the same thing. What it
can mend itself it mends: the decode node says no, or is lost before it spoke (another one takes the same ticket); the
prefill node is lost (the decode node computes what has not come). For the rest it raises `TryAgain`.
"""

import asyncio
import uuid

from kvasir.common.errors import DeadlineExceeded, Draining, InvalidRequest, NumericalError, Overloaded, ServingError
from kvasir.proto import common_pb2
from kvasir.router import wire
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.leg import Leg
from kvasir.router.life import Life, Mark
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue, Entry, Placement
from kvasir.router.types import PositionLogprobs, TokenDelta

_REQUESTS_OWN_FAULT = (InvalidRequest, NumericalError, DeadlineExceeded)

Heard = tuple[Leg | None, wire.Event | Placement | ServingError]


class TryAgain(Exception):
    """This attempt is over; another one may succeed."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(str(error))
        self.error = error


class Attempt:
    def __init__(self, life: Life, queue: AdmissionQueue, pool: NodePool, metrics: DispatchMetrics) -> None:
        self._life = life
        self._queue = queue
        self._pool = pool
        self._metrics = metrics
        self._inbox: asyncio.Queue[Heard] = asyncio.Queue()
        self._entry: Entry | None = None
        self._outputs_before = tuple(life.output_token_ids)
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._ticket: common_pb2.Ticket | None = None  # None: nobody computes the prompt elsewhere (any more)
        self._progress: wire.Progress | None = None
        self._first: tuple[int, ...] | None = None  # what the decode node continues with; None: not known yet
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._decode_has_spoken = False
        self._is_transferred = False
        late: Heard = (None, DeadlineExceeded("the request's time is over"))
        self._timer = asyncio.get_running_loop().call_at(life.deadline_s, self._inbox.put_nowait, late)
        self._wait_for_room(wants_prefill=True)

    async def next(self) -> TokenDelta:
        """The next tokens, from whichever node they come."""
        while True:
            source, event = await self._inbox.get()
            delta = self._act_on(source, event)
            if delta is not None:
                return delta

    def close(self) -> None:
        """Nothing of it stays anywhere: not in the queue, not on a node."""
        self._timer.cancel()
        if self._entry is not None:
            self._queue.leave(self._entry)
        for leg in (self._prefill, self._decode):
            if leg is not None:
                leg.close()
        while not self._inbox.empty():
            _, event = self._inbox.get_nowait()
            if isinstance(event, Placement):  # room that was found while we left
                event.release()

    def _act_on(self, source: Leg | None, event: wire.Event | Placement | ServingError) -> TokenDelta | None:
        if isinstance(event, Placement):
            self._start(event)
        elif isinstance(event, ServingError):
            raise event  # no room will come, or no time is left
        elif source is self._prefill and source is not None:
            return self._prefill_says(source, event)
        elif source is self._decode and source is not None:
            return self._decode_says(source, event)
        return None  # the last words of a leg that has been closed

    # --- room and start --------------------------------------------------------------------------------------------

    def _wait_for_room(self, *, wants_prefill: bool) -> None:
        connector = self._ticket.connector if self._ticket is not None else None
        need = self._life.need(wants_prefill=wants_prefill, connector=connector)
        self._entry = Entry(self._life.turn, need, lambda result: self._inbox.put_nowait((None, result)))
        self._queue.join(self._entry)

    def _start(self, placement: Placement) -> None:
        self._life.mark(Mark.DISPATCHED)
        request = wire.request_to_proto(self._life.request, self._outputs_before, self._life.remaining_s)
        if placement.prefill is not None:
            self._prefill = Leg(placement.prefill, self._heard)
            self._ticket = wire.ticket_to(self._prefill.node.info, transfer_id=uuid.uuid4().hex)
            self._prefill.send(wire.start_prefill(self._prefill.handle, request, self._ticket))
            self._metrics.attempts(prefill="remote")
        elif self._ticket is None:
            self._first = ()  # sampled where it is computed
            self._metrics.attempts(prefill="local")
        self._decode = Leg(placement.decode, self._heard)
        self._decode.send(wire.start_decode(self._decode.handle, request, self._ticket))
        if self._progress is not None:
            self._decode.send(wire.report_progress(self._decode.handle, self._progress))
        if self._first is not None:
            self._continue_with(self._first)

    def _heard(self, leg: Leg, event: wire.Event) -> None:
        self._inbox.put_nowait((leg, event))

    # --- prefill node ----------------------------------------------------------------------------------------------

    def _prefill_says(self, prefill: Leg, event: wire.Event) -> TokenDelta | None:
        match event:
            case wire.Admitted():
                self._num_cached_tokens = event.num_cached_tokens + event.num_fetched_tokens
                prefill.reservation.is_admitted = True
                prefill.reservation.queued_at_most(self._life.num_tokens - self._num_cached_tokens)
            case wire.Progress():
                self._progress = event
                num_computed = event.num_blocks * prefill.node.info.block_size
                prefill.reservation.queued_at_most(self._life.num_tokens - num_computed)
                if self._decode is not None:
                    self._decode.send(wire.report_progress(self._decode.handle, event))
            case wire.PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case wire.Tokens():
                return self._first_tokens(prefill, event)
            case wire.Failed():
                self._prefill_failed(prefill, event.error)
            case wire.Transferred():
                pass  # what it fetched for itself
        return None

    def _first_tokens(self, prefill: Leg, tokens: wire.Tokens) -> TokenDelta:
        prefill.has_ended = True
        prefill.reservation.release()
        if tokens.finish_reason == "handed_off":
            self._continue_with(tokens.token_ids)
            tokens = wire.Tokens(tokens.token_ids, None, tokens.logprobs)
        self._release_if_done()
        return self._take(prefill, tokens)

    def _prefill_failed(self, prefill: Leg, error: ServingError) -> None:
        self._let_go(prefill, error)
        self._prefill = None
        if self._decode is None:
            raise TryAgain(error)
        if self._first is None:
            if self._pool.can_prefill_elsewhere(self._life.need(wants_prefill=True), prefill.node):
                raise TryAgain(error)
            self._count_failure(error)
            self._compute_the_rest(self._decode, error)
            self._continue_with(())
        elif not self._all_is_in_a_store():
            self._compute_the_rest(self._decode, error)

    def _compute_the_rest(self, decode: Leg, error: ServingError) -> None:
        """No further block will come; what has landed is kept."""
        decode.send(wire.abort_transfer(decode.handle, str(error)))
        self._ticket = None

    def _all_is_in_a_store(self) -> bool:
        is_store = self._ticket is not None and not self._ticket.endpoints
        return is_store and self._progress is not None and self._progress.committed

    # --- decode node -----------------------------------------------------------------------------------------------

    def _decode_says(self, decode: Leg, event: wire.Event) -> TokenDelta | None:
        match event:
            case wire.Admitted():
                decode.reservation.is_admitted = True
                decode.reservation.queued_at_most(self._life.num_tokens - event.num_cached_tokens)
                if self._ticket is None:
                    self._num_cached_tokens = event.num_cached_tokens + event.num_fetched_tokens
            case wire.Transferred():
                self._metrics.transferred(event)
                self._is_transferred = True
                self._release_if_done()
            case wire.PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case wire.Tokens():
                return self._next_tokens(decode, event)
            case wire.Failed():
                self._decode_failed(decode, event.error)
            case wire.Progress():
                pass  # of a ticket of its own, which nobody here asked for
        return None

    def _next_tokens(self, decode: Leg, tokens: wire.Tokens) -> TokenDelta:
        self._decode_has_spoken = True
        if self._life.output_token_ids:
            self._life.mark(Mark.DECODE_START)
        decode.has_ended = tokens.finish_reason is not None
        delta = self._take(decode, tokens)
        decode.reservation.queued_at_most(0)
        decode.reservation.grow_to(self._life.num_tokens)
        return delta

    def _decode_failed(self, decode: Leg, error: ServingError) -> None:
        self._let_go(decode, error)
        self._decode = None
        if self._ticket is None or self._decode_has_spoken:
            raise TryAgain(error)
        self._count_failure(error)
        self._is_transferred = False
        self._wait_for_room(wants_prefill=False)  # the prefill goes on, whoever will take its blocks

    # --- both ------------------------------------------------------------------------------------------------------

    def _continue_with(self, token_ids: tuple[int, ...]) -> None:
        self._first = token_ids
        if self._decode is not None:
            self._decode.send(wire.continue_decode(self._decode.handle, token_ids))

    def _release_if_done(self) -> None:
        """The ticket has served when the blocks are over there and the first token is here."""
        if self._prefill is not None and self._prefill.has_ended and self._is_transferred:
            self._prefill.close()
            self._prefill = None
            self._ticket = None

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

    def _take(self, leg: Leg, tokens: wire.Tokens) -> TokenDelta:
        return self._life.take(
            tokens.token_ids,
            tokens.finish_reason,
            tokens.logprobs,
            leg.node.info.address,
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
        )
