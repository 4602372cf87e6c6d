import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvasir.router.tenants.budgets import MemoryBudgets
from kvasir.router.tenants.limiter import Limiter, RateLimited
from kvasir.router.tenants.tenant import Limits, Tenant, current_standing
from kvasir.router.types import Reader, TokenDelta


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class World:
    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.refusals: list[tuple[str, str]] = []
        budgets = MemoryBudgets(self.clock)
        self.limiter = Limiter(budgets, 600, lambda tenant, what: self.refusals.append((tenant, what)))
        self.tenant = Tenant("t", limits=Limits(**limits))
        self.num_asked = 0

    async def answer(self) -> AsyncGenerator[TokenDelta]:
        self.num_asked += 1
        for _ in range(4):
            yield TokenDelta(sequence=0, token_ids=(1, 2, 3))

    def stream(self, num_prompt_tokens: int = 10) -> AsyncGenerator[TokenDelta]:
        return self.limiter.limited(self.tenant, num_prompt_tokens, self.answer(), [Reader()])

    async def ask(self, num_prompt_tokens: int = 10) -> int:
        return len([delta async for delta in self.stream(num_prompt_tokens)])


async def test_requests_a_minute() -> None:
    world = World(requests_per_minute=2)
    assert [await world.ask(), await world.ask()] == [4, 4]
    with pytest.raises(RateLimited, match="2 requests a minute") as caught:
        await world.ask()
    assert caught.value.status == 429
    assert caught.value.headers == {"retry-after": "30"}
    assert world.num_asked == 2
    assert world.refusals == [("t", "requests")]
    world.clock.now_s += 30
    assert await world.ask() == 4


async def test_how_long_until_a_limit_is_whole_again_is_said_in_minutes_and_seconds() -> None:
    world = World(tokens_per_minute=60)
    standing: dict[str, str] = {}
    current_standing.set(standing)
    for num_prompt_tokens, reset in ((7, "7s"), (48, "1m7s")):  # the first answer had 12
        await world.ask(num_prompt_tokens)
        assert standing["x-ratelimit-reset-tokens"] == reset
    assert standing["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited):
        await world.ask()
    assert standing["x-ratelimit-reset-tokens"] == "1m19s"


async def test_tokens_a_minute_count_the_prompt_and_what_was_really_generated() -> None:
    world = World(tokens_per_minute=40)
    await world.ask(10)  # and 12 generated: 18 left
    async with aclosing(world.stream(10)) as deltas:
        await anext(deltas)  # 3 generated, then left: 5 left
    await world.ask(5)  # 0 left, and 12 below
    with pytest.raises(RateLimited, match="40 tokens a minute") as caught:
        await world.ask(1)
    assert caught.value.headers["retry-after"] == "20"  # 13 tokens at 40 a minute
    world.clock.now_s += 20
    await world.ask(1)


async def test_concurrent_requests_and_their_places_however_they_end() -> None:
    world = World(max_concurrent_requests=2)
    async with aclosing(world.stream()) as one, aclosing(world.stream()) as two:
        await anext(one)
        await anext(two)
        with pytest.raises(RateLimited, match="2 requests at once"):
            await world.ask()
        await one.aclose()
        assert await world.ask() == 4
    assert await world.ask() == 4


async def test_without_limits_nothing_is_counted() -> None:
    world = World()
    for _ in range(100):
        assert await world.ask() == 4


async def test_a_client_that_leaves_while_it_is_given_a_place_gives_it_back() -> None:
    """The place may have been taken, in another process, before the answer that says so is here."""

    class FarAway(MemoryBudgets):
        async def enter(self, name: str, member: str, num_places: int, ttl_s: float) -> bool:
            has_entered = await super().enter(name, member, num_places, ttl_s)
            is_asked.set()
            await is_told.wait()
            return has_entered

    is_asked, is_told = asyncio.Event(), asyncio.Event()
    world = World(max_concurrent_requests=1)
    world.limiter = Limiter(FarAway(), 600)
    leaving = asyncio.create_task(world.ask())
    await asyncio.wait_for(is_asked.wait(), 60)
    leaving.cancel()
    is_told.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await world.ask() == 4
