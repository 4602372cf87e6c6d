import pytest

from kvasir.common.errors import Draining, NodeUnavailable, Overloaded
from kvasir.common.seeds import sequence_seed
from kvasir.router.life import Life, Mark, describe
from kvasir.router.node_events import Tokens
from kvasir.router.queue import Turn
from tests.fake_cluster import a_request


def a_life(max_failures: int = 3) -> Life:
    return Life(a_request(10, max_tokens=5), Turn(0, 1), deadline_s=1e9, max_failures=max_failures)


async def test_what_is_said_once_is_said_with_the_first_tokens() -> None:
    life = a_life()
    first = life.take(Tokens((4,), None, ()), "p", (), 3)
    need = life.need(wants_prefill=True)
    second = life.take(Tokens((5, 6), "stop", ()), "d", (), 9)
    assert first is not None
    assert second is not None
    assert (first.num_cached_tokens, second.num_cached_tokens) == (3, None)
    assert (first.served_by, second.served_by) == ("p", "d")
    assert (life.outputs, life.open, life.outcomes) == ([[4, 5, 6]], set(), ["stop"])
    assert (need.num_tokens, need.max_num_tokens, need.num_sequences) == (11, 15, 1)


async def test_sequences_that_part_keep_their_names_and_seeds() -> None:
    life = Life(a_request(10, num_sequences=4), Turn(0, 1), deadline_s=1e9, max_failures=3)
    for sequence in range(4):
        life.take(Tokens((sequence,), "stop" if sequence == 1 else None, (), sequence), "p", (), 0)
    assert (life.num_tokens, life.need(wants_prefill=True).num_sequences) == (13, 4)
    assert (life.stop(1), life.stop(2), life.stop(9)) == (None, 2, None)
    parts = life.parts()
    assert not life.open
    assert [(part.outputs, part.request.num_sequences) for part in parts] == [([[0]], 1), ([[3]], 1)]
    assert [part.request.sampling.seed for part in parts] == [7, sequence_seed(7, 3)]
    delta = parts[1].take(Tokens((8,), "length", ()), "d", (), 5)
    assert delta is not None
    assert parts[1].take(Tokens((9,), None, ()), "d", (), 5) is None, "its reader has had enough"
    assert (delta.sequence, delta.num_cached_tokens) == (3, None)
    assert parts[0].stop(3) is None


async def test_nodes_that_fail_are_counted_and_full_ones_are_not() -> None:
    life = a_life(max_failures=2)
    for _ in range(10):
        life.note_failure(Overloaded("full"))
        life.note_failure(Draining("leaving"))
    life.note_failure(NodeUnavailable("one"))
    with pytest.raises(NodeUnavailable, match="gave up after 2 failures; the last: two"):
        life.note_failure(NodeUnavailable("two"))


def test_the_trail_of_a_request_is_one_line() -> None:
    marks = {Mark.RECEIVED: 1.0, Mark.DISPATCHED: 1.0625, Mark.FIRST_TOKEN: 1.25}
    assert describe(marks) == "received=+0.0ms dispatched=+62.5ms first_token=+250.0ms"


async def test_phases_that_never_came_have_no_length() -> None:
    life = a_life()
    assert life.between_s(Mark.RECEIVED, Mark.FINISHED) is None
    life.mark(Mark.FINISHED)
    elapsed_s = life.between_s(Mark.RECEIVED, Mark.FINISHED)
    assert elapsed_s is not None
    assert 0 <= elapsed_s < 10
