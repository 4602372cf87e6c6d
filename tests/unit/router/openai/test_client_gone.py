"""A client that leaves, at any point, ends its generation at once; so does a router that stops."""

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import pytest

from kvasir.router.openai.client_gone import ClientGone, unless_gone
from kvasir.router.types import TokenDelta
from tests.unit.router.openai.conftest import Router, ids, running_router, saying
from tests.waiting import until

TOKEN = TokenDelta(sequence=0, token_ids=tuple(ids("a")))
LAST = TokenDelta(sequence=0, token_ids=tuple(ids("z")), finish_reason="length")


async def outcomes(router: Router) -> dict[str, float]:
    names = ("stop", "length", "abort", "error", "invalid", "overloaded")
    label = 'kvasir:router_requests_total{endpoint="completions",model_name="m",outcome='
    counts = {name: await router.metric(f'{label}"{name}"') for name in names}
    return {name: count for name, count in counts.items() if count}


async def until_outcomes_are(router: Router, **expected: float) -> None:
    async with asyncio.timeout(60):
        while await outcomes(router) != expected:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2], ids=["before_the_first_token", "later"])
async def test_leaving_closes_the_generation(stream: bool, num_tokens: int, n: int) -> None:
    async with running_router(lambda _: [TOKEN] * num_tokens + [1000.0]) as router:
        dispatcher = router.dispatcher
        asking = asyncio.create_task(router.complete(stream=stream, prompt=["p"] * n))
        await until(lambda: dispatcher.num_running == n)
        asking.cancel()
        await until(lambda: dispatcher.num_running == 0)
        assert dispatcher.num_closed_early == n
        await until_outcomes_are(router, abort=1)
        assert await router.metric("kvasir:router_requests_in_flight") == 0


async def test_leaving_while_the_body_is_sent() -> None:
    async with running_router(saying("x")) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await until_outcomes_are(router, abort=1)
        assert router.dispatcher.requests == []


async def test_a_reader_that_stops_reading_holds_up_nobody_else() -> None:
    long = TokenDelta(sequence=0, token_ids=tuple(ids("a" * 50)))
    async with running_router(lambda _: [long, 0.0] * 3000 + [LAST]) as router:
        async with router.http.stream(
            "POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True}
        ) as slow:
            assert slow.status_code == 200
            assert (await router.http.get("/health")).status_code == 200
            assert router.dispatcher.num_running == 1
        await until(lambda: router.dispatcher.num_running == 0)


async def test_one_choice_that_fails_ends_the_others() -> None:
    def steps(request: Any) -> list[Any]:
        return [TOKEN, 0.05, RuntimeError("bug")] if request.request_id.endswith("-1") else [TOKEN, 1000.0]

    async with running_router(steps) as router:
        response = await router.complete(prompt=["p"] * 3)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "bug" not in response.text
        assert router.dispatcher.num_running == 0
        await until_outcomes_are(router, error=1)


async def test_stopping_lets_a_stream_finish_and_takes_nothing_new() -> None:
    async with running_router(lambda _: [TOKEN, 0.1, LAST], grace_s=60) as router:
        client = httpx.AsyncClient(base_url=router.url, timeout=60)
        running = asyncio.create_task(
            client.post("/v1/completions", json={"model": "m", "prompt": "p", "stream": True})
        )
        await until(lambda: router.dispatcher.num_running == 1)
    response = await running
    assert response.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")
    await client.aclose()


async def test_what_outlasts_the_grace_time_is_cut_off_and_closed() -> None:
    async with running_router(lambda _: [TOKEN, 1000.0]) as router:
        client = httpx.AsyncClient(base_url=router.url, timeout=60)
        running = asyncio.create_task(
            client.post("/v1/completions", json={"model": "m", "prompt": "p", "stream": True})
        )
        await until(lambda: router.dispatcher.num_running == 1)
    assert router.dispatcher.num_running == 0
    with suppress(httpx.HTTPError):
        assert "[DONE]" not in (await running).text
    await client.aclose()


async def leaving() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def staying() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_ends_with_its_client_and_whoever_asked_goes_on() -> None:
    has_ended = False

    async def work() -> None:
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it may take its time
            has_ended = True

    with pytest.raises(ClientGone):
        await unless_gone(leaving, work())
    assert has_ended
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("receive", [leaving, staying])
async def test_who_is_cancelled_is_cancelled_whether_its_client_is_there_or_not(receive: Any) -> None:
    has_begun = asyncio.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    asking = asyncio.create_task(unless_gone(receive, work()))
    await has_begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(asyncio.all_tasks()) == 1, "nobody waits for the client any more"


async def test_what_work_gives_or_raises_is_told() -> None:
    async def fine() -> int:
        return 1

    async def broken() -> int:
        raise ValueError("no")

    assert await unless_gone(staying, fine()) == 1
    with pytest.raises(ValueError, match="no"):
        await unless_gone(staying, broken())


async def test_work_may_make_something_else_of_its_end() -> None:
    async def result() -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 1

    async def error() -> int:
        await result()
        raise ValueError("no")

    assert await unless_gone(leaving, result()) == 1
    with pytest.raises(ValueError, match="no"):
        await unless_gone(leaving, error())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "what comes after is not taken for cancelled"
