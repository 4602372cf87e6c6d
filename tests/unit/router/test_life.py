import pytest

from kvasir.common.errors import Draining, NodeUnavailable, Overloaded
from kvasir.router.life import Life, Mark, describe
from kvasir.router.queue import Turn
from tests.fake_cluster import a_request


def a_life(max_failures: int = 3) -> Life:
    return Life(a_request(10, max_tokens=5), 0, Turn(0, 1), deadline_s=1e9, max_failures=max_failures)


async def test_what_is_said_once_is_said_with_the_first_tokens() -> None:
    life = a_life()
    first = life.take((4,), None, (), "p", prompt_logprobs=(), num_cached_tokens=3)
    second = life.take((5, 6), "stop", (), "d", prompt_logprobs=(), num_cached_tokens=9)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (3, None)
    assert (first.served_by, second.served_by) == ("p", "d")
    assert life.output_token_ids == [4, 5, 6]
    assert life.has_finished
    need = life.need(wants_prefill=True)
    assert (need.num_tokens, need.max_num_tokens) == (13, 15)


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
