"""Commands over streams that break."""

import asyncio
from typing import Any

import pytest

from kvasir.router import wire
from kvasir.router.nodes import Role
from kvasir.router.session_commands import Commands
from tests.fake_cluster import until


class Stream:
    """Takes so many messages, then it breaks."""

    def __init__(self, num_taken: int) -> None:
        self._num_left = num_taken
        self.taken: list[Any] = []

    async def write(self, message: Any) -> None:
        if self._num_left == 0:
            raise asyncio.InvalidStateError
        self._num_left -= 1
        self.taken.append(message)

    @property
    def numbers(self) -> list[int]:
        return [message.number for message in self.taken if message.WhichOneof("command") != "acknowledge"]


def some_commands(number: int) -> Commands:
    commands = Commands(Role.DECODE)
    for handle in range(number):
        commands.add(wire.cancel(Role.DECODE, handle))
    return commands


async def test_what_a_broken_stream_may_have_lost_is_written_to_the_next() -> None:
    commands = some_commands(5)
    first = Stream(3)
    with pytest.raises(asyncio.InvalidStateError):
        async with asyncio.timeout(10):
            await commands.write(first, lambda: 0)
    assert first.numbers == [1, 2, 3]
    commands.begin_stream(last_number=2)
    second = Stream(100)
    writing = asyncio.create_task(commands.write(second, lambda: 7))
    try:
        await until(lambda: len(second.numbers) == 3)
        commands.add(wire.cancel(Role.DECODE, 9))
        await until(lambda: len(second.numbers) == 4)
        assert second.numbers == [3, 4, 5, 6]
        await until(lambda: len(second.taken) > 4)
        assert second.taken[-1].acknowledge.last_event == 7
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


def test_what_has_arrived_is_kept_no_longer() -> None:
    commands = some_commands(3)
    commands.confirm(2)
    assert not commands.all_confirmed
    commands.confirm(3)
    assert commands.all_confirmed
