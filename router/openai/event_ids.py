"""Ids of events: `RESPONSE:17` is the 17th of a stream, whichever process sends it.

Where other processes can go on with a stream, an event that could not be noted for them has an id with a name that only
we have, `RESPONSE.NAME:17`: somebody else's 17th event may be another one.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from kvasir.router.openai.errors import HttpError
from kvasir.router.openai.stream_notes import StreamLog

_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,128})(?:\.([0-9a-f]{32}))?:([0-9]{1,18})")


class EventId(NamedTuple):
    response_id: str
    number: int
    branch: str = ""  # whose it is alone


def parse_event_id(event_id: str) -> EventId:
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        raise HttpError(400, "Last-Event-ID is not the id of an event of a stream", "invalid_event_id")
    return EventId(match[1], int(match[3]), match[2] or "")


class Numbering:
    """Gives each event an id that names the stream and the place in it."""

    __slots__ = ("_branch", "_head", "_log", "_num_shared", "number", "response_id")

    def __init__(self, response_id: str, log: StreamLog | None = None) -> None:
        self.response_id = response_id
        self.number = 0  # of the last event
        self._log = log
        self._branch = ""
        self._num_shared = 0  # events that whoever goes on with the stream has, too
        self._head = f"id: {response_id}:".encode()

    def numbered(self, one: bytes) -> bytes:
        self.number += 1
        if self._log is not None and not self._branch:
            self._note_branch(self._log.branch)
        return b"%b%d\n%b" % (self._head, self.number, one)

    def knows(self, event_id: EventId) -> bool:
        """False: it is of somebody who has gone on with the stream without us."""
        if not self._branch:
            return not event_id.branch
        return event_id.branch == self._branch or (not event_id.branch and event_id.number <= self._num_shared)

    async def all(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for one in events:
                yield self.numbered(one)

    def _note_branch(self, branch: str) -> None:
        if branch:
            self._branch = branch
            self._head = f"id: {self.response_id}.{branch}:".encode()
        else:
            self._num_shared = self.number
