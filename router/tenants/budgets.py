"""Budgets that fill steadily, and rooms with so many places: what limits are made of, in memory or shared by routers.

A budget is a bucket: it holds a minute's worth at most. What costs an amount known only afterwards (an answer) is
charged then, and may bring it below zero; nothing more is given before it is above zero again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Budget:
    capacity: float
    per_s: float

    @classmethod
    def per_minute(cls, amount: float) -> "Budget":
        return cls(amount, amount / 60)


@dataclass(frozen=True, slots=True)
class Balance:
    is_allowed: bool
    left: float
    wait_s: float  # until it would be allowed

    def __post_init__(self) -> None:
        assert self.wait_s >= 0


class Budgets(Protocol):
    """`name` is a tenant's, and says of what. Whatever shares these shares the limits."""

    async def take(self, name: str, budget: Budget, amount: float) -> Balance:
        """Take `amount`, if there is at least 1 (or the whole capacity, if that is less)."""
        ...

    async def charge(self, name: str, budget: Budget, amount: float) -> None:
        """Take it in any case."""
        ...

    async def enter(self, name: str, member: str, num_places: int, ttl_s: float) -> bool:
        """Take a place, or keep the one it has; False if all are taken. It is free again after `leave`, or `ttl_s` if
        that never comes."""
        ...

    async def leave(self, name: str, member: str) -> None: ...

    async def close(self) -> None: ...


def filled(level: float, budget: Budget, elapsed_s: float) -> float:
    return min(budget.capacity, level + budget.per_s * max(0.0, elapsed_s))


def balance(level: float, budget: Budget, amount: float) -> Balance:
    """What `take` answers at this level."""
    wanted = min(1.0, budget.capacity)
    if level >= wanted:
        return Balance(True, level - amount, 0.0)
    return Balance(False, level, (wanted - level) / budget.per_s)


class MemoryBudgets:
    """Of one process. One entry a tenant and kind, so as many as there are keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # level, and when
        self._rooms: dict[str, dict[str, float]] = {}  # when a member's place becomes free by itself

    async def take(self, name: str, budget: Budget, amount: float) -> Balance:
        result = balance(self._level(name, budget), budget, amount)
        if result.is_allowed:
            self._levels[name] = (result.left, self._clock())
        return result

    async def charge(self, name: str, budget: Budget, amount: float) -> None:
        self._levels[name] = (self._level(name, budget) - amount, self._clock())

    async def enter(self, name: str, member: str, num_places: int, ttl_s: float) -> bool:
        now = self._clock()
        room = {one: until for one, until in self._rooms.get(name, {}).items() if until > now}
        self._rooms[name] = room
        if member not in room and len(room) >= num_places:
            return False
        room.setdefault(member, now + ttl_s)
        return True

    async def leave(self, name: str, member: str) -> None:
        self._rooms.get(name, {}).pop(member, None)

    async def close(self) -> None:
        """Nothing is open."""

    def _level(self, name: str, budget: Budget) -> float:
        level, at_s = self._levels.get(name, (budget.capacity, self._clock()))
        return filled(level, budget, self._clock() - at_s)
