"""Streams whose clients leave and come back: nothing lost, nothing twice, nobody else's."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import httpx
import pytest

from kvasir.router.openai.event_ids import EventId, Numbering
from kvasir.router.openai.kept_streams import KeptStream
from kvasir.router.openai.sse import HEARTBEAT, EventStream
from kvasir.router.types import RoutedRequest
from tests.fake_dispatcher import Step, play
from tests.sse import sse_events
from tests.unit.router.openai.conftest import Router, ids, running_router, saying

TEXT = "what is kept is not lost, and what was sent is not sent again"
ENDPOINTS = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


async def read(
    router: Router, path: str, last_id: str | None = None, at_most: int = 10**6, **body: object
) -> list[tuple[str, str]]:
    """(id, data) of events, until the end or until so many have come; then the connection is cut."""
    headers = {} if last_id is None else {"last-event-id": last_id}
    options = {"stream": True, "stream_options": {"resume_grace_s": 60}}
    events: list[tuple[str, str]] = []
    json = {"model": "m", **ENDPOINTS[path], **options, **body} if last_id is None else None
    async with asyncio.timeout(60), router.http.stream("POST", path, json=json, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for event in sse_events(response):
            events.append(event)
            if len(events) == at_most:
                break
    return events


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_client_that_comes_back_again_and_again_misses_nothing(path: str) -> None:
    cut = random.Random(5)
    async with running_router(saying(TEXT, pause_s=0.002), api_keys=["a"]) as router:
        events = await read(router, path, at_most=2)
        while len(router.dispatcher.requests) and not _is_last(events[-1][1]):
            events += await read(router, path, events[-1][0], at_most=cut.randint(1, 9))
        assert len(router.dispatcher.requests) == 1, "generated once"
        stream, numbers = zip(*(event_id.rsplit(":", 1) for event_id, _ in events), strict=True)
        assert len(set(stream)) == 1
        assert [int(number) for number in numbers] == list(range(1, len(events) + 1))
        again = await read(router, path, events[4][0])
        assert again == events[5:], "also when all of it has been sent"


def _is_last(data: str) -> bool:
    return data == "[DONE]" or '"type":"response.completed"' in data


async def test_without_being_asked_to_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with running_router(saying(TEXT, pause_s=0.01)) as router:
        events = await read(router, "/v1/completions", at_most=3, stream_options={})
        assert events[2][0].endswith(":3")
        async with asyncio.timeout(60):
            while router.dispatcher.num_running:
                await asyncio.sleep(0.01)
        assert router.dispatcher.num_closed_early == 1
        assert (await resume(router, events[2][0])).status_code == 404


async def test_a_client_that_stays_away_costs_no_more_than_its_grace() -> None:
    async with running_router(saying(TEXT * 10, pause_s=0.01)) as router:
        events = await read(router, "/v1/completions", at_most=3, stream_options={"resume_grace_s": 0.05})
        async with asyncio.timeout(60):
            while router.dispatcher.num_running:
                await asyncio.sleep(0.01)
        assert router.dispatcher.num_closed_early == 1
        assert (await resume(router, events[2][0])).status_code == 404


async def resume(router: Router, last_id: str, key: str | None = None) -> httpx.Response:
    headers = {"last-event-id": last_id} | ({} if key is None else {"authorization": f"Bearer {key}"})
    return await router.http.post("/v1/completions", headers=headers)


async def test_what_cannot_be_gone_on_with_is_said_so() -> None:
    async with running_router(saying("abc"), api_keys=["a", "b"]) as router:
        events = await read(router, "/v1/completions")
        stream = events[0][0].rsplit(":", 1)[0]
        assert (await resume(router, f"{stream}:1", key="b")).status_code == 404, "another key's"
        assert (await resume(router, f"{stream}:{len(events) + 1}")).status_code == 404, "never sent"
        assert (await resume(router, "cmpl-other:1")).status_code == 404
        for elsewhere in ("/v1/chat/completions", "/v1/responses"):
            response = await router.http.post(elsewhere, headers={"last-event-id": f"{stream}:1"})
            assert response.status_code == 404, "another endpoint's"
        for wrong in ("", "x", f"{stream}:", f"{stream}:-1", f"{stream}:1:2x", ":1", "x" * 5000):
            assert (await resume(router, wrong)).status_code in (400, 404), wrong
        assert (await resume(router, f"{stream}:{len(events)}")).text == ""


async def test_only_so_many_are_kept() -> None:
    async with running_router(saying("abc")) as router:
        for _ in range(4):
            await read(router, "/v1/completions")
        options = {"stream": True, "stream_options": {"resume_grace_s": 60}}
        refused = await router.complete(**options)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await router.complete(stream=True)).status_code == 200
        assert (await router.complete(stream=True, stream_options={"resume_grace_s": 0})).status_code == 400
        assert router.dispatcher.num_running == 0


async def test_one_key_cannot_take_all_places() -> None:
    """Of the four, it may have three."""
    options = {"stream": True, "stream_options": {"resume_grace_s": 60}, "model": "m", "prompt": "p"}
    async with running_router(saying("abc"), api_keys=["a", "b"]) as router:
        for key, status in (("a", 200), ("a", 200), ("a", 200), ("a", 503), ("b", 200), ("b", 503)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await router.http.post("/v1/completions", json=options, headers=headers)
            assert answer.status_code == status, (key, answer.text)


async def test_the_shortest_grace_cuts_no_client_short_that_stays() -> None:
    async with running_router(saying(TEXT, pause_s=0.001)) as router:
        events = await read(router, "/v1/completions", stream_options={"resume_grace_s": 1e-9})
        assert events[-1][1] == "[DONE]"


async def test_streams_that_wait_for_their_first_token_count() -> None:
    """The router keeps four."""
    may_go_on = False

    def script(request: RoutedRequest) -> Iterator[Step]:
        while not may_go_on:
            yield 0.001
        yield from play(ids("abc"), request)

    async with running_router(script) as router, asyncio.TaskGroup() as tasks:  # type: ignore[arg-type]
        asked = [tasks.create_task(read(router, "/v1/completions")) for _ in range(4)]
        async with asyncio.timeout(60):
            while router.dispatcher.num_running < 4:
                await asyncio.sleep(0.001)
        refused = await router.complete(stream=True, stream_options={"resume_grace_s": 60})
        may_go_on = True
        assert refused.status_code == 503
    assert all(task.result()[-1][1] == "[DONE]" for task in asked)


async def test_a_reader_that_is_too_slow_is_told_so() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        for number in range(100):
            await asyncio.sleep(0)
            yield b"%9d\n" % number

    async def close() -> None:
        is_over.set()

    is_over = asyncio.Event()
    stream = KeptStream(source(), close, 5, 200, Numbering("r"))
    async with aclosing(stream.read(0)) as events:
        assert await anext(events) == b"%9d\n" % 0
        await asyncio.wait_for(is_over.wait(), 60)
        rest = [event async for event in events]
    assert len(rest) == 1
    assert b"stream_not_found" in rest[0], "and not as if this were the end"
    await stream.close()


async def test_what_is_kept_of_one_stream_is_bounded() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        for number in range(100):
            yield b"%9d\n" % number

    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    stream = KeptStream(source(), close, 5, 200, Numbering("r"))
    await asyncio.wait_for(closed.wait(), 60)
    assert not stream.has(EventId("r", 79))
    assert stream.has(EventId("r", 80))
    assert [int(event) for event in [event async for event in stream.read(80)]] == list(range(80, 100))
    await stream.close()


async def test_a_silent_stream_says_that_it_is_alive() -> None:
    sent: list[bytes] = []
    go_on = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        yield b"data: x\n\n"

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: object) -> None:
        sent.append(message.get("body", b""))  # type: ignore[attr-defined]
        if sent.count(HEARTBEAT) == 3:
            go_on.set()

    async with asyncio.timeout(60):
        await EventStream(events(), heartbeat_s=0.01)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert sent[-2:] == [b"data: x\n\n", b""]
    assert set(sent[1:-2]) == {HEARTBEAT}
