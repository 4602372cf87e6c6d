import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvasir.router.merge import merge


async def count(name: str, num_items: int, closed: list[str]) -> AsyncGenerator[str]:
    try:
        for index in range(num_items):
            yield f"{name}{index}"
            await asyncio.sleep(0)
    finally:
        closed.append(name)


async def fail() -> AsyncGenerator[str]:
    yield "before"
    raise ValueError("broken")


async def test_all_items_of_all_streams_each_in_its_order() -> None:
    closed: list[str] = []
    items = [item async for item in merge([count("a", 3, closed), count("b", 5, closed)])]
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert [item for item in items if item[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    assert sorted(closed) == ["a", "b"]


async def test_an_error_of_one_ends_all() -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([count("a", 10**9, closed), fail()]):
            pass
    assert closed == ["a"]


async def test_closing_it_closes_all() -> None:
    closed: list[str] = []
    async with aclosing(merge([count("a", 10**9, closed), count("b", 10**9, closed)])) as items:
        await anext(items)
        await asyncio.sleep(0.01)
    assert sorted(closed) == ["a", "b"]
