"""Requests that have ended are freed at once. What waits for the garbage collector makes it look at more, and later all
at once, while every stream stands still."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvasir.router.types import RoutedRequest
from tests.fake_cluster import a_request, collect, fake_cluster
from tests.fake_dispatcher import Step, play
from tests.unit.router.openai.conftest import ids, running_router


@contextmanager
def nothing_left() -> Iterator[None]:
    """Of the router's objects, by what is done within."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left = sorted({type(one).__qualname__ for one in gc.garbage if "kvasir.router" in type(one).__module__})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


async def test_the_dispatching_half_leaves_no_cycles() -> None:
    async with fake_cluster() as cluster:
        await collect(cluster.dispatcher.generate(a_request()))
        with nothing_left():
            for num_sequences in (1, 3):
                await collect(cluster.dispatcher.generate(a_request(num_sequences=num_sequences)))
            await cluster.settle()


async def test_the_http_half_leaves_no_cycles() -> None:
    def script(request: RoutedRequest) -> Sequence[Step]:
        return play(ids("some words"), request, pause_s=0.0005)

    async with running_router(script) as router:
        router.dispatcher.takes = True
        await router.complete(prompt="p", stream=True)
        with nothing_left():
            for stream in (True, False):
                await router.complete(prompt="p", stream=stream, max_tokens=20)
