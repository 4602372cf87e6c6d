"""The same in memory and in a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvasir.router.tenants import redis_budgets
from kvasir.router.tenants.budgets import Budget, Budgets, MemoryBudgets
from kvasir.router.tenants.redis_budgets import RedisBudgets
from tests.valkey import RedisServer

NEVER_FILLS = Budget(10, 1e-9)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: a server that is there has answered in time."""
    monkeypatch.setattr(redis_budgets, "_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def budgets(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Budgets]:
    budgets: Budgets = MemoryBudgets() if request.param == "memory" else RedisBudgets(server.url, request.node.name)
    yield budgets
    await budgets.close()


async def test_a_budget_is_spent_and_says_how_long_to_wait(budgets: Budgets) -> None:
    assert [(await budgets.take("a", NEVER_FILLS, 4)).is_allowed for _ in range(3)] == [True, True, True]
    refused = await budgets.take("a", NEVER_FILLS, 1)
    assert not refused.is_allowed
    assert refused.left == pytest.approx(-2)  # the third took more than there was
    assert refused.wait_s == pytest.approx(3e9)
    assert (await budgets.take("b", NEVER_FILLS, 1)).left == pytest.approx(9)


async def test_what_is_charged_afterwards_counts(budgets: Budgets) -> None:
    await budgets.charge("a", NEVER_FILLS, 9.5)
    assert not (await budgets.take("a", NEVER_FILLS, 1)).is_allowed


async def test_a_budget_fills_again_but_never_over(budgets: Budgets) -> None:
    fast = Budget(2, 1000)
    await budgets.take("a", fast, 2)
    async with asyncio.timeout(60):
        while not (found := await budgets.take("a", fast, 0)).is_allowed or found.left < 2:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert (await budgets.take("a", fast, 0)).left == pytest.approx(2)


async def test_a_place_is_free_again_when_left_or_forgotten(budgets: Budgets) -> None:
    assert await budgets.enter("a", "one", 2, 60)
    assert await budgets.enter("a", "two", 2, 0.05)
    await budgets.leave("a", "one")
    assert await budgets.enter("a", "three", 2, 60)
    async with asyncio.timeout(60):
        while not await budgets.enter("a", "four", 2, 60):
            await asyncio.sleep(0.01)
    assert not await budgets.enter("a", "five", 2, 60)
    assert await budgets.enter("b", "five", 2, 60)
    await budgets.leave("a", "nobody")


async def test_whoever_has_a_place_does_not_want_another(budgets: Budgets) -> None:
    """What is sent twice for a broken connection was refused the last place, which it held itself, and kept it."""
    for _ in range(2):
        assert await budgets.enter("a", "one", 1, 60)
    await budgets.leave("a", "one")
    assert await budgets.enter("a", "two", 1, 60)
    assert not await budgets.enter("a", "one", 1, 60)


async def test_many_at_once_get_what_there_is(budgets: Budgets) -> None:
    found = await asyncio.gather(*(budgets.take("a", NEVER_FILLS, 1) for _ in range(30)))
    assert sum(one.is_allowed for one in found) == 10


async def test_a_redis_that_is_away_limits_nobody() -> None:
    failures: list[None] = []
    with RedisServer() as server:
        url = server.url
    budgets = RedisBudgets(url, on_failure=lambda: failures.append(None))
    assert (await budgets.take("a", NEVER_FILLS, 1)).is_allowed
    await budgets.charge("a", NEVER_FILLS, 1)
    assert await budgets.enter("a", "one", 1, 60)
    await budgets.leave("a", "one")
    await budgets.close()
    assert len(failures) == 4


async def test_a_redis_that_stands_still_limits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_budgets, "_TIMEOUT_S", 0.2)
    failures: list[None] = []
    with RedisServer() as server:
        budgets = RedisBudgets(server.url, on_failure=lambda: failures.append(None))
        server.freeze()
        async with asyncio.timeout(60):
            assert (await budgets.take("a", NEVER_FILLS, 1)).is_allowed
            await budgets.charge("a", NEVER_FILLS, 1)
            assert await budgets.enter("a", "one", 1, 60)
            await budgets.leave("a", "one")
        server.thaw()
        await budgets.close()
    assert len(failures) == 4


async def test_a_redis_is_not_blamed_for_a_stall_of_our_own(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer lay there when the second had passed, which we had spent on something else."""
    monkeypatch.setattr(redis_budgets, "_TIMEOUT_S", 1.0)
    failures: list[None] = []
    budgets = RedisBudgets(server.url, "stall", on_failure=lambda: failures.append(None))
    await budgets.take("a", NEVER_FILLS, 1)
    server.freeze()
    taking = asyncio.create_task(budgets.take("a", NEVER_FILLS, 1))
    await asyncio.sleep(0.05)  # it has asked
    server.thaw()
    time.sleep(1.3)  # noqa: ASYNC251  (on purpose)
    assert (await taking).left == pytest.approx(8)
    assert not failures
    await budgets.close()
