"""How one request goes: attempt after attempt, acted on as nodes speak. No task stands between a node's word and what
is done about it, and a client that reads slowly keeps nobody."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kvasir.common.errors import DeadlineExceeded, ServingError
from kvasir.router.attempt import Attempt, Heard, TryAgain
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.leg import Leg
from kvasir.router.life import Life
from kvasir.router.node_events import Tokens
from kvasir.router.queue import Placement
from kvasir.router.types import TokenDelta

log = logging.getLogger(__name__)

Hear = Callable[[Attempt, Leg | None, Heard], None]


class Course:
    """Of one life. `deliver` gets its tokens. `over` is called once, unless it is closed before: with what ended it,
    and with the lives that go on from there by themselves."""

    __slots__ = ("_attempt", "_deliver", "_inbox", "_is_over", "_metrics", "_new_attempt", "_over", "_timer", "life")

    def __init__(
        self,
        life: Life,
        new_attempt: Callable[[Life, Hear], Attempt],
        metrics: DispatchMetrics,
        deliver: Callable[[TokenDelta], None],
        over: Callable[["Course", Exception | None, list[Life]], None],
    ) -> None:
        self.life = life
        self._new_attempt = new_attempt
        self._metrics = metrics
        self._deliver = deliver
        self._over = over
        self._is_over = False
        self._inbox: deque[tuple[Attempt, Leg | None, Heard]] = deque()
        self._attempt = new_attempt(life, self._hear)
        self._timer = asyncio.get_running_loop().call_at(life.deadline_s, self._be_late)

    def stop(self, client_sequence: int) -> None:
        """Fine for one that is none of these, or has ended."""
        if not self._is_over:
            self._attempt.stop(client_sequence)

    def close(self) -> None:
        """Nothing of it stays anywhere."""
        self._is_over = True
        self._timer.cancel()
        self._attempt.close()

    def _be_late(self) -> None:
        self._end(DeadlineExceeded("the request's time is over"))

    def _hear(self, attempt: Attempt, source: Leg | None, event: Heard) -> None:
        """Tokens are acted on at once. All else waits a moment: whoever told us of it may be in the midst of changing
        what we would change, as a queue that places others beside us."""
        if type(event) is Tokens and not self._inbox:
            self._act(attempt, source, event)
            return
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._act_on_all)
        self._inbox.append((attempt, source, event))

    def _act_on_all(self) -> None:
        while self._inbox:
            try:
                self._act(*self._inbox[0])
            finally:
                self._inbox.popleft()  # not before: what comes meanwhile stands behind it

    def _act(self, attempt: Attempt, source: Leg | None, event: Heard) -> None:
        if self._is_over or attempt is not self._attempt:
            if isinstance(event, Placement):  # room that was found while we left
                event.release()
            return
        try:
            delta = attempt.act_on(source, event)
            if not self.life.open:
                attempt.close()
            if delta is not None:
                self._metrics.num_tokens += len(delta.token_ids)
                self._deliver(delta)
            if not self.life.open:
                self._end(None)
        except TryAgain as failure:
            self._try_again(failure)
        except Exception as error:  # a fault of our own too: the node's other requests go on
            self._end(error)

    def _try_again(self, failure: TryAgain) -> None:
        try:
            self._begin_anew(failure)
        except Exception as error:
            self._end(error)

    def _begin_anew(self, failure: TryAgain) -> None:
        """Raises what ended the last of the attempts that it may have."""
        self._attempt.close()
        self._metrics.retries(reason=type(failure.error).__name__)
        log.info("%s: %s; trying again", self.life.request.request_id, failure)
        self.life.note_failure(failure.error)
        if self.life.has_begun and self.life.request.num_sequences > 1:
            self._end(None, self.life.parts())
        else:
            self._attempt = self._new_attempt(self.life, self._hear)

    def _end(self, error: Exception | None, parts: list[Life] | None = None) -> None:
        if not self._is_over:
            self.close()
            self._over(self, error, parts or [])


def outcome_of(error: Exception | None) -> str:
    """Of sequences that have none of their own."""
    return type(error).__name__ if isinstance(error, ServingError) else "abort"
