"""What the router says in a session: commands, numbered, kept until the node says that they arrived."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvasir.router import wire
from kvasir.router.nodes import Role

_ACKNOWLEDGE_EVERY_S = 0.4  # below what a node expects of us


class Commands:
    """Of one session, over all of its streams."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._last_number = 0
        self._unconfirmed: deque[wire.Command] = deque()
        self._to_write: deque[wire.Command] = deque()
        self._has_more = asyncio.Event()

    @property
    def all_confirmed(self) -> bool:
        return not self._unconfirmed

    def add(self, command: wire.Command) -> None:
        self._last_number += 1
        command.number = self._last_number
        self._unconfirmed.append(command)
        self._to_write.append(command)
        self._has_more.set()

    def confirm(self, last_number: int) -> None:
        """The node has them up to this one."""
        while self._unconfirmed and self._unconfirmed[0].number <= last_number:
            self._unconfirmed.popleft()

    def begin_stream(self, last_number: int) -> None:
        """A new one, to a node that has them up to this one: those behind it are written again."""
        self.confirm(last_number)
        self._to_write = deque(self._unconfirmed)

    def clear(self) -> None:
        self._unconfirmed.clear()
        self._to_write.clear()

    async def write(self, call: Any, last_event: Callable[[], int]) -> None:
        """To the stream `call`, until it ends; in between, up to which event all have come."""
        loop = asyncio.get_running_loop()
        acknowledge_at_s = loop.time() + random.uniform(0, _ACKNOWLEDGE_EVERY_S)  # not those of all nodes at once
        while True:
            while self._to_write:
                await call.write(self._to_write.popleft())  # if this fails, it is still unconfirmed
            if loop.time() >= acknowledge_at_s:
                acknowledge_at_s = loop.time() + _ACKNOWLEDGE_EVERY_S
                await call.write(wire.acknowledge(self._role, last_event()))
                continue
            self._has_more.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(acknowledge_at_s):
                    await self._has_more.wait()
