"""The clock by which others are waited for: it does not go while this process could not have taken anything in."""

import asyncio
import time

import pytest

from kvasir.common.own_time import Limit, OwnTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_goes_as_the_clock_does_where_somebody_looks() -> None:
    clock = Clock()
    own = OwnTime(clock)
    own.begin()
    for _ in range(50):
        clock.now_s += 0.1
        own.look()
    assert own() == pytest.approx(105.0)


def test_it_stands_still_where_nobody_could_look() -> None:
    clock = Clock()
    own = OwnTime(clock)
    own.begin()
    clock.now_s += 30.0
    assert own() == pytest.approx(100.5), "before anybody has looked"
    own.look()
    assert own() == pytest.approx(100.5)
    clock.now_s += 0.1
    own.end()
    assert own() == pytest.approx(100.6)


def test_it_goes_on_while_nothing_is_waited_for() -> None:
    clock = Clock()
    own = OwnTime(clock)
    own.begin()
    own.end()
    clock.now_s += 30.0
    assert own() == pytest.approx(130.0)
    own.begin()
    assert own() == pytest.approx(130.0)


async def test_a_limit_ends_a_wait() -> None:
    own = OwnTime(time.monotonic)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Limit(own, own() + 0.2) as limit:
            await asyncio.sleep(20)
    assert limit.expired
    assert time.monotonic() - started_s >= 0.2


async def test_a_limit_can_be_moved_both_ways() -> None:
    own = OwnTime(time.monotonic)
    has_waited = False
    with pytest.raises(TimeoutError):
        async with Limit(own, own() + 0.05) as limit:
            limit.at_s = own() + 60
            await asyncio.sleep(0.3)
            has_waited = True
            limit.at_s = own()
            await asyncio.sleep(20)
    assert has_waited


async def test_a_limit_lets_a_cancel_through() -> None:
    own, began = OwnTime(time.monotonic), asyncio.Event()

    async def wait() -> None:
        async with Limit(own):
            began.set()
            await asyncio.sleep(20)

    task = asyncio.create_task(wait())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_time_in_which_the_event_loop_is_held_up_does_not_count() -> None:
    own = OwnTime(time.monotonic)
    came = asyncio.Event()
    async with Limit(own, own() + 2.0):
        await asyncio.sleep(0)
        time.sleep(2.4)  # noqa: ASYNC251  (on purpose)
        asyncio.get_running_loop().call_later(0.01, came.set)
        await came.wait()
