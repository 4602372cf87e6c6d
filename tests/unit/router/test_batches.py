"""One call after the other, and an answer for everybody."""

import asyncio
from collections.abc import Sequence

import pytest

from kvasir.router.batches import Batches


async def test_what_comes_while_a_call_is_on_its_way_goes_with_the_next() -> None:
    sent: list[Sequence[int]] = []
    go_on = asyncio.Event()

    async def send(numbers: Sequence[int]) -> list[int]:
        sent.append(numbers)
        await go_on.wait()
        if 3 in numbers:
            raise OSError("three")
        return [10 * number for number in numbers]

    batches = Batches(send)
    async with asyncio.timeout(60):
        first = batches.add(1)
        await asyncio.sleep(0)
        second, third = batches.add(2), batches.add(3)
        second.cancel()
        go_on.set()
        assert await first == 10
        with pytest.raises(OSError, match="three"):
            await third
        assert await batches.add(4) == 40
    assert sent == [[1], [2, 3], [4]]


async def test_who_waits_when_it_is_closed_waits_no_longer() -> None:
    async def never(numbers: Sequence[int]) -> list[int]:
        await asyncio.Event().wait()
        return []

    batches = Batches(never)
    first = batches.add(1)
    await asyncio.sleep(0)
    second = batches.add(2)
    await batches.close()
    for answer in (first, second, batches.add(3)):
        with pytest.raises(asyncio.CancelledError):
            await answer


async def test_who_asks_just_before_it_is_closed_does_not_wait() -> None:
    async def echo(numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    batches = Batches(echo)
    answer = batches.add(1)
    await batches.close()
    assert answer.cancelled()


async def test_a_call_that_is_cancelled_or_answered_wrongly_is_not_the_last() -> None:
    faults: list[BaseException | None] = [asyncio.CancelledError(), None]

    async def send(numbers: Sequence[int]) -> Sequence[int]:
        if not faults:
            return numbers
        if (fault := faults.pop(0)) is not None:
            raise fault
        return []

    batches = Batches(send)
    async with asyncio.timeout(60):
        first = batches.add(1)
        await asyncio.wait([first])
        assert first.cancelled()
        with pytest.raises(ValueError, match="shorter"):
            await batches.add(2)
        assert await batches.add(3) == 3
