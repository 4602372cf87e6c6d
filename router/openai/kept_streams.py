"""Streams that their reader may come back to: what was sent is kept, and the generation goes on without a reader for as
long as the client has asked for.

    POST ... "stream_options": {"resume_grace_s": 20}    events carry `id: RESPONSE:1`, `id: RESPONSE:2`, ...
    POST ... Last-Event-ID: RESPONSE:17                   the events from 18 on, then as they come; no body is needed
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

from kvasir.common.errors import Overloaded
from kvasir.router.openai.errors import StreamNotKept, error_body
from kvasir.router.openai.event_ids import EventId, Numbering, parse_event_id
from kvasir.router.openai.sse import EventStream, event
from kvasir.router.openai.stream_notes import StreamLog, StreamOrigin, TakenStream


class KeptStream:
    """Reads its source to the end, whether somebody listens or not, and ends it when nobody has for too long."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        grace_s: float,
        max_bytes: int,
        numbering: Numbering,
        on_forgotten: Callable[["KeptStream"], None] | None = None,
    ) -> None:
        """`events`: those that `numbering` numbers. `on_forgotten` is called once: nobody has come back in time, or
        another process goes on with it."""
        self.numbering = numbering
        self._grace_s = grace_s
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._num_dropped = 0  # of the oldest, to stay within max_bytes
        self._num_bytes = 0
        self._num_readers = 1  # the client that began it, until it has `left`
        self._news = asyncio.Event()
        self.is_over = False
        self._source = asyncio.create_task(self._pump(events, close))
        self._patience: asyncio.TimerHandle | None = None
        self._on_forgotten = on_forgotten

    def has(self, event_id: EventId) -> bool:
        """Whether the events after this one are all there (to come)."""
        is_there = self._num_dropped <= event_id.number <= self._num_dropped + len(self._events)
        return is_there and self.numbering.knows(event_id)

    async def left(self) -> None:
        """A reader less."""
        self._num_readers -= 1
        if not self._num_readers:
            self._patience = asyncio.get_running_loop().call_later(self._grace_s, self._forget)

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events number `after` + 1 and on, to the end."""
        self._num_readers += 1
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        try:
            while True:
                while after < self._num_dropped + len(self._events):
                    if after < self._num_dropped:  # too slow a reader
                        yield event(error_body(StreamNotKept()))
                        return
                    yield self._events[after - self._num_dropped]
                    after += 1
                if self.is_over:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            await self.left()

    async def close(self) -> None:
        """With our process; another one may go on with it."""
        self._on_forgotten = None
        self._forget()
        await asyncio.gather(self._source, return_exceptions=True)

    async def _pump(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        try:
            async with aclosing(events):
                async for one in events:
                    self._keep(one)
        except asyncio.CancelledError:
            self._be_forgotten()
            raise
        finally:
            self.is_over = True
            self._news.set()
            await close()

    def _keep(self, one: bytes) -> None:
        self._events.append(one)
        self._num_bytes += len(one)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self._news.set()

    def _forget(self) -> None:
        self._source.cancel()
        self._be_forgotten()

    def _be_forgotten(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        callback, self._on_forgotten = self._on_forgotten, None
        if callback is not None:
            callback(self)


class KeptStreams:
    """Those of one process. `owner`: whoever a stream belongs to; for anybody else it is not there."""

    def __init__(
        self, *, max_grace_s: float, max_streams: int, max_of_one: int | None = None, max_bytes: int = 16 << 20
    ) -> None:
        """`max_of_one`: of these, so many at most are one owner's; None: all may be."""
        self._max_of_one = max_streams if max_of_one is None else max_of_one
        self._max_grace_s = max_grace_s
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._streams: dict[tuple[str, str], KeptStream] = {}
        self._num_taken: Counter[str] = Counter()  # by owner: those that are kept, and those that are about to be

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """For a stream that is kept within. Raises Overloaded if there is none."""
        if self._num_taken.total() >= self._max_streams:
            raise Overloaded(f"{self._max_streams} streams are kept for clients to come back to: no room for another")
        if self._num_taken[owner] >= self._max_of_one:
            raise Overloaded(f"{self._max_of_one} streams of this key are kept to come back to: no room for another")
        self._num_taken[owner] += 1
        try:
            yield
        finally:
            self._give_back(owner)

    def _give_back(self, owner: str) -> None:
        self._num_taken[owner] -= 1
        if not self._num_taken[owner]:
            del self._num_taken[owner]

    def keep(
        self,
        owner: str,
        numbering: Numbering,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        grace_s: float,
        log: StreamLog | None = None,
        last_event: int = 0,
    ) -> EventStream:
        """The answer to the client that began it, or goes on with it behind the last event that it has."""
        key = owner, numbering.response_id
        forget, grace_s = partial(self._forget, key, log), min(grace_s, self._max_grace_s)
        stream = self._streams[key] = KeptStream(events, close, grace_s, self._max_bytes, numbering, forget)
        self._num_taken[owner] += 1
        return EventStream(stream.read(after=last_event), close=stream.left)

    def is_coming(self, owner: str, event_id: EventId) -> bool:
        stream = self._streams.get((owner, event_id.response_id))
        return stream is not None and not stream.is_over and stream.numbering.knows(event_id)

    def new_log(self, owner: str, origin: StreamOrigin, grace_s: float) -> StreamLog | None:
        """Where a stream of this process is noted for the case that it dies; None: nowhere."""
        return None

    def events(self, owner: str, last_event_id: str) -> AsyncGenerator[bytes, None]:
        """Those behind the last that a client has. 404 if there is nothing to go on with: it has to begin anew."""
        event_id = parse_event_id(last_event_id)
        stream = self._streams.get((owner, event_id.response_id))
        if stream is None or not stream.has(event_id):
            raise StreamNotKept
        return stream.read(after=event_id.number)

    async def resume(self, owner: str, last_event_id: str, endpoint: str) -> EventStream | TakenStream:
        """The answer to a client that has come back, or what to make it of."""
        return EventStream(self.events(owner, last_event_id))

    def _forget(self, key: tuple[str, str], log: StreamLog | None, stream: KeptStream) -> None:
        if self._streams.get(key) is stream:  # else it was taken back from us before
            del self._streams[key]
        self._give_back(key[0])
        if log is not None:
            log.forget()

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            await stream.close()
