"""What a worker notes of its streams: whatever the parent does, no stream waits for it."""

import asyncio

from kvasir.proto import workers_pb2 as pb
from kvasir.router.workers.hub_notes import HubNotes


class FailingHub:
    """Takes note from the second call on."""

    def __init__(self) -> None:
        self.calls: list[pb.NoteStreamsRequest] = []

    async def NoteStreams(self, request: pb.NoteStreamsRequest) -> pb.NoteStreamsResponse:
        self.calls.append(request)
        if len(self.calls) == 1:
            raise RuntimeError("the channel is closed")
        return pb.NoteStreamsResponse()


async def test_a_call_that_fails_in_whatever_way_holds_up_nothing() -> None:
    hub = FailingHub()
    notes = HubNotes(hub, worker=0)
    async with asyncio.timeout(60):
        await notes.add(pb.StreamNote(owner="o", response_id="a"))
        await notes.add(pb.StreamNote(owner="o", response_id="b"))
    assert [note.response_id for call in hub.calls for note in call.notes] == ["a", "b"]
