import pytest

from kvasir.bench.sse import EventReader

STREAM = (
    b": a comment\n\n"
    b'data: {"text": "na\xc3\xafve"}\n\n'
    b"event: ping\r\ndata:no space\r\n\r\n"
    b"data: first\ndata: second\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = ['{"text": "naïve"}', "no space", "first\nsecond", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    events = [event for start in range(0, len(STREAM), size) for event in reader.feed(STREAM[start : start + size])]
    assert events == EVENTS


def test_an_event_is_given_only_when_complete() -> None:
    reader = EventReader()
    assert reader.feed(b"data: half") == []
    assert reader.feed(b" whole\n") == []
    assert reader.feed(b"\n") == ["half whole"]
