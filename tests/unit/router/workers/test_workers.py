"""`kvasir router --workers 2`: two real processes on one port, which no client can tell from one."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.sse import sse_events
from tests.waiting import until
from tests.workers import Workers, running_workers

SLOW_S = 0.02  # a token of a node that takes its time


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    async with running_workers(tmp_path_factory.mktemp("model"), is_static=True) as workers:
        yield workers


@pytest.fixture
def workers(shared_workers: Workers) -> Workers:
    shared_workers.decode.behaviour.token_s = 0.0
    shared_workers.decode.behaviour.most_tokens = None
    return shared_workers


async def test_limits_are_of_all_workers_together(workers: Workers) -> None:
    start_s = time.monotonic()
    num_limited = await workers.metric("kvasir:router_requests_limited_total")
    statuses = [(await workers.complete("few")).status_code for _ in range(14)]
    refilled = int((time.monotonic() - start_s) / 10) + 1  # one in ten seconds
    assert 6 <= statuses.count(200) <= 6 + refilled
    assert set(statuses) == {200, 429}
    assert (await workers.complete("b")).status_code == 200
    num_limited += statuses.count(429)
    await workers.until(lambda: _metric_is(workers, "kvasir:router_requests_limited_total", num_limited))


async def test_all_workers_say_the_same_of_the_model(workers: Workers) -> None:
    """Once, each told when it had started itself."""
    words = Path(f"/proc/{workers.process.pid}/cmdline").read_text().split("\0")  # noqa: ASYNC240
    model_time_s = int(Path(words[words.index("--model") + 1]).stat().st_mtime)  # noqa: ASYNC240
    cards = [(await workers.ask("GET", "/v1/models/m")).json() for _ in range(6)]
    assert {card["created"] for card in cards} == {model_time_s}


async def test_stored_responses_are_there_for_all_workers(workers: Workers) -> None:
    first = (await workers.ask("POST", "/v1/responses", "a", model="m", input="hi", max_output_tokens=4)).json()
    path = f"/v1/responses/{first['id']}"
    for _ in range(3):
        assert (await workers.ask("GET", path, "a")).json()["output"] == first["output"]
        assert (await workers.ask("GET", path, "b")).status_code == 404, "another key's"
    body = {"model": "m", "input": "go on", "max_output_tokens": 4, "previous_response_id": first["id"]}
    for _ in range(2):
        assert (await workers.ask("POST", "/v1/responses", "a", **body)).status_code == 200
    assert (await workers.ask("DELETE", path, "a")).status_code == 200
    assert [(await workers.ask("GET", path, "a")).status_code for _ in range(2)] == [404, 404]


async def test_what_is_said_of_the_router_is_said_of_all_workers(workers: Workers) -> None:
    names = (
        r"kvasir:router_requests_total.*length",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
    )
    before = [await workers.metric(name) for name in names]
    for _ in range(6):
        assert (await workers.complete()).status_code == 200
    for name, then, more in zip(names, before, (6, 24, 6), strict=True):
        await workers.until(lambda: _metric_is(workers, name, then + more))  # noqa: B023
    for _ in range(2):
        assert await workers.metric(r"kvasir:nodes{") == 2, "each worker sees the same two"
        await workers.until(lambda: _cluster_says(workers, before[1] + 24))

    workers.decode.behaviour.most_tokens = 50  # however slow workers are: none ends before
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(read(workers, max_tokens=100)) for _ in range(4)]
        await workers.until(lambda: _num_at_decode_node(workers) == 4)  # asking a worker would take a turn
        await workers.until(lambda: _load_is(workers, 4))
        await workers.until(lambda: _metric_is(workers, "kvasir:router_requests_in_flight", 4))
        workers.decode.behaviour.most_tokens = None
    answers = [stream.result()[0][0].partition(":")[0] for stream in streams]
    for answer in answers:
        for _ in range(2):
            await workers.until(lambda: _was_served_by_both(workers, answer))  # noqa: B023
    sessions = workers.decode.sessions.values()
    assert len(sessions) == 2, "each worker has its own"
    assert all(session.last_command > 10 for session in sessions), "and both have been used"


async def _metric_is(workers: Workers, pattern: str, expected: float) -> bool:
    """A worker that does not answer in time counts with what it has said last."""
    return await workers.metric(pattern) == expected


async def _cluster_says(workers: Workers, num_tokens: float) -> bool:
    """A worker that does not answer in time is left out."""
    cluster = (await workers.ask("GET", "/cluster")).json()
    assert sorted(node["role"] for node in cluster["nodes"]) == ["decode", "prefill"]
    return bool(sum(one["num_tokens"] for one in cluster["latencies"]) == num_tokens)


async def _was_served_by_both(workers: Workers, answer: str) -> bool:
    found = (await workers.ask("GET", f"/cluster?answer={answer}")).json()["served_by"]
    return bool(found == [workers.prefill.address, workers.decode.address])


async def _metric_is_at_least(workers: Workers, pattern: str, expected: float) -> bool:
    return await workers.metric(pattern) >= expected


def _num_at_decode_node(workers: Workers) -> int:
    return sum(not one.is_canary for one in workers.decode.requests)


async def _load_is(workers: Workers, number: int) -> bool:
    return bool((await workers.ask("GET", "/load")).json() == {"server_load": number})


async def read(
    workers: Workers,
    last_id: str | None = None,
    at_most: int = 10**6,
    key: str = "a",
    on_event: Callable[[int], None] = lambda number: None,
    **body: object,
) -> list[tuple[str, str]]:
    """(id, data) of events on a new connection, until the end or until so many have come."""
    request = {"model": "m", "prompt": "hello", "stream": True, "seed": 1, **body} if last_id is None else None
    headers = {} if last_id is None else {"last-event-id": last_id}
    events: list[tuple[str, str]] = []
    async with (
        workers.client(key) as client,
        client.stream("POST", "/v1/completions", json=request, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for event in sse_events(response):
            events.append(event)
            on_event(len(events))
            if len(events) == at_most:
                break
    return events


def text_of(events: list[tuple[str, str]]) -> str:
    choices = [json.loads(data)["choices"][0] for _, data in events if data != "[DONE]"]
    return "".join(choice["text"] for choice in choices)


async def test_a_stream_goes_on_whichever_worker_its_client_comes_back_to(workers: Workers) -> None:
    options = {"max_tokens": 150, "stream_options": {"resume_grace_s": 60}}
    whole = await read(workers, **options)
    workers.decode.behaviour.token_s = 0.005
    num_started = workers.decode.num_started
    events = await read(workers, at_most=3, **options)
    while events[-1][1] != "[DONE]":
        events += await read(workers, events[-1][0], at_most=11)
    assert workers.decode.num_started == num_started + 1, "generated once"
    assert [int(event_id.rpartition(":")[2]) for event_id, _ in events] == list(range(1, len(events) + 1))
    assert text_of(events) == text_of(whole)
    for _ in range(2):
        assert await read(workers, events[4][0]) == events[5:], "also when all of it has been sent"
        refused = await _resume(workers, events[4][0], "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found"), "another key's"
        assert (await _resume(workers, "nonsense", "a")).status_code == 400


async def _resume(workers: Workers, last_id: str, key: str) -> httpx.Response:
    async with workers.client(key) as client:
        return await client.post("/v1/completions", headers={"last-event-id": last_id})


async def test_a_worker_that_dies_is_replaced_and_takes_nothing_with_it_that_is_not_its_own(workers: Workers) -> None:
    num_sessions = len(workers.decode.sessions)
    num_tokens = await workers.metric("vllm:generation_tokens_total")
    for _ in range(4):
        assert (await workers.complete("b")).status_code == 200
    await workers.until(lambda: _metric_is(workers, "vllm:generation_tokens_total", num_tokens + 16))
    before = workers.pids
    assert len(before) == 2
    workers.decode.behaviour.most_tokens = 50
    reading = [asyncio.create_task(read(workers, key="places", max_tokens=2000)) for _ in range(4)]
    await workers.until(lambda: _num_at_decode_node(workers) == 4)  # two at each worker
    await workers.until(lambda: _load_is(workers, 4))
    assert (await workers.complete("places")).status_code == 429
    os.kill(before[0], signal.SIGKILL)
    await workers.until(lambda: sum(task.done() for task in reading) == 2)
    await workers.until(lambda: _has_a_place(workers))  # the places of its requests are free
    await workers.until(workers.are_up_and_ready)
    answers = [await workers.complete("places") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert before[1] in workers.pids
    assert before[0] not in workers.pids
    assert sum(task.done() for task in reading) == 2, "those of the other worker go on"
    await workers.until(lambda: _metric_is_at_least(workers, "vllm:generation_tokens_total", num_tokens + 28))
    await until(lambda: len(workers.decode.sessions) == num_sessions + 1)  # the dead one's is kept for a while
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def test_who_comes_while_a_worker_is_replaced_is_served(workers: Workers) -> None:
    """By the others, until the new one knows the nodes; and the router stays ready."""
    dead = workers.pids[0]
    os.kill(dead, signal.SIGKILL)
    statuses, is_replaced = set(), False
    while not is_replaced:
        is_replaced = len({*workers.pids} - {dead}) == 2 and await _are_both_up(workers)
        for asked in (workers.complete("b"), workers.ask("GET", "/ready")):
            with suppress(httpx.TransportError):  # it was handed to the dead one
                statuses.add((await asked).status_code)
    for _ in range(2):
        statuses.add((await workers.complete("b")).status_code)
    assert statuses == {200}


async def _are_both_up(workers: Workers) -> bool:
    with suppress(httpx.TransportError):
        return await workers.metric("kvasir:router_processes") == 2
    return False


async def _has_a_place(workers: Workers) -> bool:
    """Not before the parent knows that the worker has died, which until then it may hand a connection to."""
    try:
        return (await workers.complete("places")).status_code == 200
    except httpx.TransportError:
        return False


async def test_a_signal_lets_all_workers_finish_what_they_have_begun(tmp_path: Path) -> None:
    async with running_workers(tmp_path) as workers:
        workers.decode.behaviour.token_s = SLOW_S
        workers.decode.behaviour.most_tokens = 30  # however slow workers are: none ends before the signal
        options = {"max_tokens": 60, "stream_options": {"resume_grace_s": 60}}
        last_id = (await read(workers, at_most=3, **options))[-1][0]
        counts = dict.fromkeys(range(6), 0)
        reading = []
        for at in counts:  # two come back to the first, one of them at another worker
            asked = read(workers, last_id if at > 3 else None, on_event=partial(counts.__setitem__, at), **options)
            reading.append(asyncio.create_task(asked))
        await workers.until(lambda: min(counts.values()) > 0)
        await workers.until(lambda: _load_is(workers, 5))
        workers.process.send_signal(signal.SIGTERM)
        await workers.until(lambda: _refuses_connections(workers))
        workers.decode.behaviour.most_tokens = None
        events = await asyncio.wait_for(asyncio.gather(*reading), 60)
        assert all(one[-1][1] == "[DONE]" for one in events)
        assert await asyncio.wait_for(workers.process.wait(), 60) == 0
        assert not _num_at_decode_node(workers)


async def _refuses_connections(workers: Workers) -> bool:
    try:
        await workers.ask("GET", "/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it was the last to be let in
        pass
    return False


async def test_without_its_parent_no_worker_stays(tmp_path: Path) -> None:
    async with running_workers(tmp_path) as workers:
        pids = workers.pids
        folder = _folder_of(pids[0])
        assert (folder / "hub").exists()
        workers.process.kill()
        await workers.process.wait()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        await until(lambda: not folder.exists())


def _folder_of(pid: int) -> Path:
    """The second of its arguments."""
    return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-3])
