"""The line of waiting requests, on a clock of its own."""

import pytest

from kvasir.common.errors import NodeUnavailable, Overloaded, ServingError
from kvasir.router.costs import LocalPrefill
from kvasir.router.nodes import Role
from kvasir.router.policy import Rules, least_loaded
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue, Entry, Placement
from kvasir.router.views import Need
from tests.unit.router.test_pool import NO_SESSION, info, load


class Line:
    """A queue over one decode node with two seats; `events` says who was placed, or failed, in order."""

    def __init__(self, *, is_sized: bool = False, num_sharing: int = 1, priority_aging_s: float = 0.0) -> None:
        """`is_sized`: to the nodes that are here."""
        self.now_s = 0.0
        self.pool = NodePool()
        self.queue = AdmissionQueue(
            self.pool,
            Rules(least_loaded, LocalPrefill()),
            max_num_queued_reqs=None if is_sized else 3,
            max_num_queued_tokens=None if is_sized else 1000,
            node_wait_s=10,
            num_sharing=num_sharing,
            priority_aging_s=priority_aging_s,
            clock=lambda: self.now_s,
        )
        self.events: list[str] = []
        self.placements: dict[str, Placement] = {}

    def add_decode(self, num_blocks: int = 100) -> None:
        self.pool.add(info("d:1", max_num_seqs=2, num_total_blocks=num_blocks), NO_SESSION, load(num_blocks))

    def add_prefill(self) -> None:
        self.pool.add(info("p:1", Role.PREFILL), NO_SESSION, load())

    def join(self, name: str, num_tokens: int = 50, priority: int = 0, wants_prefill: bool = True) -> Entry:
        def placed(result: Placement | ServingError) -> None:
            if isinstance(result, Placement):
                self.placements[name] = result
            self.events.append(name if isinstance(result, Placement) else f"{name}: {type(result).__name__}")

        turn = self.queue.take_turn(priority, num_tokens)
        need = Need(num_tokens=num_tokens, max_num_tokens=num_tokens + 50, wants_prefill=wants_prefill)
        entry = Entry(turn, need, placed)
        self.queue.join(entry)
        return entry


def test_first_come_first_served_within_a_priority() -> None:
    line = Line()
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        line.join(name, priority=priority)
    assert line.events == []
    assert (line.queue.num_waiting, line.queue.num_waiting_tokens) == (3, 150)
    line.add_decode()
    assert line.events == ["b", "a"]
    line.placements["b"].release()
    assert line.events == ["b", "a", "c"]
    assert (line.queue.num_waiting, line.queue.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize("priority_aging_s", [0.0, 5.0])
def test_who_waits_gains_priority(priority_aging_s: float) -> None:
    """Strictly by priority, a flow of urgent requests kept one of low priority waiting for as long as it went on."""
    line = Line(priority_aging_s=priority_aging_s)
    line.add_decode()
    for name in ("first", "second"):
        line.join(name)
    line.join("patient", priority=4)
    served = ["first", "second"]
    for second in range(30):
        line.now_s = float(second)
        line.join(f"urgent {second}")
        line.placements[served[-1]].release()
        served.append(line.events[-1])
        assert len(line.events) == 3 + second
    assert ("patient" in served) == (priority_aging_s > 0)
    if priority_aging_s:
        assert served.index("patient") == 2 + 4 * 5, "after those who came in the time of four levels"


def test_nobody_overtakes_a_large_request_that_waits_for_room() -> None:
    line = Line()
    line.add_decode(num_blocks=20)
    line.join("a", 150)
    line.join("large", 200)
    line.join("small", 16)
    assert line.events == ["a"]
    line.placements["a"].release()
    assert line.events == ["a", "large", "small"]


def test_a_request_that_comes_back_takes_its_old_place() -> None:
    line = Line()
    line.add_decode()
    first = line.join("first")
    line.join("second")
    line.join("third")
    line.placements["first"].release()  # its node failed it ...
    assert line.events == ["first", "second", "third"]
    line.join("fourth")
    line.queue.join(Entry(first.turn, first.need, lambda result: line.events.append("first again")))
    line.placements["second"].release()
    assert line.events == ["first", "second", "third", "first again"]


def test_a_full_line_refuses_by_requests_and_by_tokens() -> None:
    line = Line()
    for name in "abc":
        line.join(name)
    with pytest.raises(Overloaded, match="3 requests with 150 prompt tokens are waiting"):
        line.join("d")
    line = Line()
    line.join("long", 5000)  # alone in the line: never refused for being long
    with pytest.raises(Overloaded, match="1 requests with 5000"):
        line.join("next", 1)
    assert line.events == []


def test_whoever_finds_it_full_is_told_how_long_the_last_one_waited() -> None:
    line = Line()
    line.join("a")
    line.now_s = 7.5
    line.add_decode()
    for name in "bcde":  # one more runs, and the others wait
        line.join(name)
    assert line.events == ["a", "b"]
    with pytest.raises(Overloaded) as caught:
        line.join("f")
    assert caught.value.retry_after_s == 1.0  # b has not waited at all
    line.now_s = 12.0
    line.placements["a"].release()
    line.join("f")
    with pytest.raises(Overloaded) as caught:
        line.join("g")
    assert caught.value.retry_after_s == 4.5


def test_by_default_the_line_is_as_long_as_the_nodes_are_large() -> None:
    line = Line(is_sized=True)
    for number in range(100):
        line.join(f"early-{number}")  # no node is here yet: they wait for one
    line.add_decode()
    assert len(line.events) == 2
    with pytest.raises(Overloaded):
        line.join("late")

    line = Line(is_sized=True, num_sharing=2)
    line.add_decode(num_blocks=100)
    for number in range(2 + 8):  # two run; 8 for each seat may wait, of which half is ours
        line.join(f"{number}")
    with pytest.raises(Overloaded, match="8 requests"):
        line.join("one more")

    line = Line(is_sized=True)
    line.add_decode(num_blocks=10)
    line.join("runs", 100)
    num_tokens = 8 * 10 * line.pool.nodes(Role.DECODE)[0].info.block_size
    for number in range(num_tokens // 110):
        line.join(f"waits-{number}", 110)
    with pytest.raises(Overloaded, match="prompt tokens"):
        line.join("one more", 110)


def test_who_leaves_is_never_placed() -> None:
    line = Line()
    first, second = line.join("a"), line.join("b")
    line.queue.leave(first)
    line.queue.leave(first)
    line.add_decode()
    assert line.events == ["b"]
    line.queue.leave(second)
    assert line.queue.num_waiting_tokens == 0


def test_a_pair_is_reserved_together() -> None:
    line = Line()
    line.add_prefill()
    line.add_decode()
    line.join("a", 50)
    line.join("b", 50, wants_prefill=False)
    prefill, decode = line.placements["a"].prefill, line.placements["a"].decode
    assert prefill is not None
    assert (prefill.node.info.address, decode.node.info.address) == ("p:1", "d:1")
    assert (prefill.num_queued_tokens, decode.num_queued_tokens, decode.num_blocks) == (50, 0, 4)
    assert line.placements["b"].prefill is None
    line.placements["a"].release()
    assert not prefill.node.reservations


def test_who_could_never_be_held_waits_for_another_node_and_no_longer() -> None:
    line = Line()
    line.join("a")
    line.queue.expire()
    line.now_s = 9.9
    line.queue.expire()
    assert line.events == []
    line.now_s = 10.0
    line.queue.expire()
    assert line.events == [f"a: {NodeUnavailable.__name__}"]
    assert line.queue.num_waiting == 0

    line.join("b", 2000)
    line.add_decode(num_blocks=200)  # in time
    assert line.events[1:] == ["b"]
    line.join("c", 3000)  # would need an empty node, but fits one
    line.now_s += 1000
    line.queue.expire()
    assert line.queue.num_waiting == 1


def test_who_could_never_be_held_does_not_hold_up_the_others() -> None:
    """The large node has gone: its request waits for another one, and keeps its place; the rest fits the small one."""
    line = Line()
    line.join("large", 800)
    line.add_decode(num_blocks=40)
    line.join("small")
    assert line.events == ["small"]
    line.pool.add(info("d:2"), NO_SESSION, load())
    assert line.events == ["small", "large"]
    assert (line.queue.num_waiting, line.queue.num_waiting_tokens) == (0, 0)
