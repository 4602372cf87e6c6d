"""What the parent notes of resumable streams: whose it is, for how long, and how much of it."""

import pytest

from kvasir.proto import workers_pb2 as pb
from kvasir.router.workers.stream_records import StreamRecords


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begun(stream: str, owner: str = "o", body: bytes = b"{}") -> pb.StreamNote:
    head = pb.StreamHead(endpoint="completions", body=body, grace_s=10)
    return pb.StreamNote(owner=owner, response_id=stream, begun=head)


def tokens(stream: str, number: int, line: bytes = b"[1]\n", owner: str = "o") -> pb.StreamNote:
    return pb.StreamNote(owner=owner, response_id=stream, tokens=pb.StreamTokens(number=number, line=line))


def taken(records: StreamRecords, worker: int, stream: str, owner: str = "o") -> bytes | None:
    answer = records.take(worker, owner, stream, "completions")
    return answer.lines if answer.HasField("head") else None


def test_a_stream_is_taken_from_the_dead_alone_and_once() -> None:
    records = StreamRecords()
    for note in (begun("s"), tokens("s", 0, b"a\n"), tokens("s", 1, b"b\n")):
        records.note(0, note)
    assert records.take(1, "o", "s", "completions") == pb.TakeStreamResponse(is_held=True)
    assert records.take(1, "other", "s", "completions") == pb.TakeStreamResponse()
    records.died(1)
    assert taken(records, 1, "s") is None
    records.died(0)
    records.note(0, tokens("s", 2))  # it was on its way when its worker died: no client has seen it
    assert records.take(1, "o", "s", "chat/completions") == pb.TakeStreamResponse()
    assert taken(records, 1, "s") == b"a\nb\n"
    assert records.take(0, "o", "s", "completions").is_held, "now it is another one's"
    records.note(1, tokens("s", 2, b"c\n"))
    records.note(1, pb.StreamNote(owner="o", response_id="s", is_given_back=True))
    assert taken(records, 0, "s") == b"a\nb\nc\n"
    records.note(1, pb.StreamNote(owner="o", response_id="s", is_over=True))
    assert len(records) == 1, "it is not that worker's any more"
    records.note(0, pb.StreamNote(owner="o", response_id="s", is_over=True))
    assert len(records) == 0


def test_it_waits_for_its_client_as_long_as_that_has_asked_for() -> None:
    clock = Clock()
    records = StreamRecords(clock=clock)
    records.note(0, begun("s"))
    clock.now_s = 1000.0
    records.drop_old()
    records.died(0)
    clock.now_s += 9.9
    assert taken(records, 1, "s") == b""
    records.died(1)
    clock.now_s += 10.0
    assert taken(records, 0, "s") is None
    assert len(records) == 0


@pytest.mark.parametrize("number", [0, 2])
def test_a_stream_with_a_gap_is_none(number: int) -> None:
    records = StreamRecords()
    for note in (begun("s"), tokens("s", 0), tokens("s", number)):
        records.note(0, note)
    assert len(records) == 0
    records.note(0, tokens("s", 3))
    assert len(records) == 0


def test_who_has_the_most_loses_the_oldest() -> None:
    records = StreamRecords(max_bytes=1000)
    records.note(0, begun("mine", "modest", bytes(100)))
    for number in range(20):
        records.note(0, begun(f"s{number}", "greedy", bytes(100)))
    records.note(0, tokens("mine", 0, bytes(150), "modest"))
    records.died(0)
    assert taken(records, 1, "mine", "modest") == bytes(150)
    assert [number for number in range(20) if taken(records, 1, f"s{number}", "greedy") is not None] == [*range(13, 20)]
    records.note(1, begun("huge", "greedy", bytes(2000)))
    assert taken(records, 1, "huge", "greedy") is None
    assert len(records) == 1
