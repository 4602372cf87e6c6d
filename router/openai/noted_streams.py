"""Kept streams that outlive their process: what they are made of is noted elsewhere, and whoever their client comes to
goes on with them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvasir.router.openai.errors import StreamNotKept
from kvasir.router.openai.event_ids import parse_event_id
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.sse import EventStream
from kvasir.router.openai.stream_notes import Notes, StreamLog, StreamOrigin, TakenStream

_FOUND_WITHIN_S = 5.0
_LOOK_AGAIN_S = 0.1

# A stream that another process keeps, given its owner and the id of the last event that its client has.
Elsewhere = Callable[[str, str], Awaitable[EventStream | None]]


class NotedStreams(KeptStreams):
    def __init__(
        self,
        notes: Notes,
        elsewhere: Sequence[Elsewhere] = (),
        *,
        max_grace_s: float,
        max_streams: int,
        max_of_one: int | None = None,
    ) -> None:
        super().__init__(max_grace_s=max_grace_s, max_streams=max_streams, max_of_one=max_of_one)
        self._notes = notes
        self._elsewhere = elsewhere

    def new_log(self, owner: str, origin: StreamOrigin, grace_s: float) -> StreamLog:
        return self._notes.new_log(owner, origin, min(grace_s, self._max_grace_s))

    async def resume(self, owner: str, last_event_id: str, endpoint: str) -> EventStream | TakenStream:
        """Whoever has it may be about to die, or to go on with it: then this is asked again, for a while."""
        event_id = parse_event_id(last_event_id)
        end_s = asyncio.get_running_loop().time() + _FOUND_WITHIN_S
        while True:
            try:
                return await super().resume(owner, last_event_id, endpoint)
            except StreamNotKept:
                found: TakenStream | bool = True  # here, where it has not come so far again
                if not self.is_coming(owner, event_id):
                    for resumed in self._elsewhere:
                        stream = await resumed(owner, last_event_id)
                        if stream is not None:
                            return stream
                    if event_id.branch:
                        raise
                    found = await self._notes.take(owner, event_id.response_id, event_id.number, endpoint)
                if isinstance(found, TakenStream):
                    return found
                if not found or asyncio.get_running_loop().time() > end_s:
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def close(self) -> None:
        await super().close()
        await self._notes.close()
