"""Who hears what a node says, and in which order."""

import asyncio

from kvasir.common.errors import NodeUnavailable
from kvasir.common.tokens import pack_tokens
from kvasir.proto import common_pb2 as pb
from kvasir.router.node_events import Event, Failed, Tokens
from kvasir.router.pace import Pace
from kvasir.router.sinks import Sinks


def a_step(handle: int, token_id: int) -> pb.StepOutput:
    return pb.StepOutput(outputs=[pb.SequenceOutput(handle=handle, token_ids=pack_tokens([token_id]))])


def token_ids(events: list[Event]) -> list[tuple[int, ...]]:
    return [event.token_ids for event in events if isinstance(event, Tokens)]


async def test_each_hears_its_own_until_it_is_removed() -> None:
    sinks = Sinks(Pace(longest_s=0), [].append)
    one: list[Event] = []
    other: list[Event] = []
    first, second = sinks.add(one.append), sinks.add(other.append)
    for number, handle in enumerate([first, second, first]):
        sinks.step(a_step(handle, number))
    assert token_ids(one) == [(0,), (2,)]
    assert token_ids(other) == [(1,)]
    sinks.remove(first)
    sinks.step(a_step(first, 3))
    assert token_ids(one) == [(0,), (2,)]
    assert len(sinks) == 1


async def test_steps_that_wait_come_together_and_before_a_failure() -> None:
    pace = Pace(longest_s=60.0)
    sinks = Sinks(pace, [].append)
    heard: list[Event] = []
    handle = sinks.add(heard.append)
    sinks.step(a_step(handle, 1))
    pace.gap_s = 60.0
    sinks.step(a_step(handle, 2))
    sinks.step(a_step(handle, 3))
    await asyncio.sleep(0)
    assert token_ids(heard) == [(1,)]
    sinks.tell(handle, Failed(NodeUnavailable("gone")))
    assert token_ids(heard) == [(1,), (2, 3)]
    assert isinstance(heard[-1], Failed)


async def test_all_are_told_each_by_an_event_of_its_own() -> None:
    sinks = Sinks(Pace(longest_s=0), [].append)
    heard: list[Event] = []
    for _ in range(3):
        sinks.add(heard.append)
    sinks.tell_all(lambda: Failed(NodeUnavailable("gone")))
    errors = [event.error for event in heard if isinstance(event, Failed)]
    assert len({id(error) for error in errors}) == 3


async def test_what_cannot_be_delivered_is_told_of() -> None:
    failures: list[Exception] = []
    sinks = Sinks(Pace(longest_s=0), failures.append)
    heard: list[Event] = []
    handle = sinks.add(heard.append)
    sinks.step(pb.StepOutput(outputs=[pb.SequenceOutput(handle=handle, token_ids=b"12")]))
    assert [type(failure) for failure in failures] == [ValueError]
    sinks.step(a_step(handle, 3))
    assert token_ids(heard) == [(3,)]
