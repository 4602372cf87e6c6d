"""Resumable streams whose worker is killed: another one goes on with them, and the client gets each event once."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvasir.common.tokens import unpack_tokens
from tests.fake_request import expected_tokens
from tests.sse import sse_events
from tests.workers import TIMEOUT_S, Workers, running_workers

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "two choices": ("/v1/completions", {"prompt": "hello", "n": 2, "stop": "e"}),
    "three prompts": ("/v1/completions", {"prompt": ["hello", "you", "there"], "n": 2, "stop": "e"}),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "responses": ("/v1/responses", {"input": "hello"}),
}
NUM_TOKENS = 100
NUM_STREAMS = 6  # connections go to the two workers in turn, so that each has some


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    async with running_workers(tmp_path_factory.mktemp("model"), is_static=True) as workers:
        workers.decode.behaviour.token_s = 0.01
        yield workers


async def follow(
    workers: Workers, path: str, body: dict[str, Any], on_event: Callable[[int], None] = lambda number: None
) -> list[tuple[str, str]]:
    """(id, data) of each event, however often the connection breaks."""
    options = {"include_usage": True, "resume_grace_s": 60}
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": NUM_TOKENS}
    body = {"model": "m", "stream": True, "ignore_eos": True, "stream_options": options, **limit, **body}
    events: list[tuple[str, str]] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not events or not _is_last(events[-1][1]):
            headers = {"last-event-id": events[-1][0]} if events else {}
            try:
                async with (
                    workers.client() as client,
                    client.stream("POST", path, json=None if events else body, headers=headers) as response,
                ):
                    if response.status_code == 503:  # a new worker knows no node yet: Retry-After
                        await asyncio.sleep(0.1)
                        continue
                    assert response.status_code == 200, await response.aread()
                    async for event in sse_events(response):
                        events.append(event)
                        on_event(len(events))
            except httpx.TransportError:
                assert events, "it was begun"
    return events


def _is_last(data: str) -> bool:
    return data == "[DONE]" or '"type":"response.incomplete"' in data or '"type":"response.completed"' in data


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def texts(events: list[tuple[str, str]]) -> dict[int, str]:
    """By choice."""
    found: dict[int, str] = {}
    for _, data in events:
        if data == "[DONE]":
            continue
        content = json.loads(data)
        assert "error" not in content or content["error"] is None, content
        if content.get("type") == "response.output_text.delta":
            found[0] = found.get(0, "") + content["delta"]
        for choice in content.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def check_is_one_stream(events: list[tuple[str, str]]) -> None:
    assert [int(event_id.rpartition(":")[2]) for event_id, _ in events] == list(range(1, len(events) + 1))
    [response_id] = {event_id.rpartition(":")[0] for event_id, _ in events}
    told = [json.loads(data) for _, data in events if data != "[DONE]"]
    if not response_id.startswith("resp_"):
        assert {one["id"] for one in told} == {response_id}
        assert len({one["created"] for one in told}) == 1
        assert told[-1]["usage"]["total_tokens"] == sum(
            told[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens")
        )
        return
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert len({one["item_id"] for one in told if "item_id" in one}) == 1
    assert {one["response"]["id"] for one in told if "response" in one} == {response_id}


def usage(events: list[tuple[str, str]]) -> Any:
    told = [json.loads(data) for _, data in events if data != "[DONE]"][-1]
    return told["response"]["usage"] if "response" in told else told["usage"]


def num_tokens_of(events: list[tuple[str, str]]) -> int:
    told = usage(events)
    return int(told["output_tokens"] if "output_tokens" in told else told["completion_tokens"])


async def test_streams_go_on_when_all_workers_are_killed_in_their_midst_and_after_their_end(workers: Workers) -> None:
    requests = [(path, {**body, "seed": 7}) for path, body in REQUESTS.values()]
    wholes = [await follow(workers, path, body) for path, body in requests]
    num_tokens = sum(num_tokens_of(events) for events in wholes)
    counts = dict.fromkeys(range(len(requests)), 0)
    killed: list[int] = []

    def seen(stream: int) -> None:
        counts[stream] += 1
        if not killed and min(counts.values()) > 10:
            killed.extend(workers.pids)
            kill(killed)

    following = [follow(workers, *one, lambda _, at=at: seen(at)) for at, one in enumerate(requests)]
    answers = await asyncio.gather(*following)
    for events, whole in zip(answers, wholes, strict=True):
        check_is_one_stream(events)
        assert texts(events) == texts(whole)
        assert usage(events) == usage(whole)
    await workers.until(workers.are_up_and_ready)
    assert killed
    assert not set(killed) & set(workers.pids)
    assert await workers.metric("vllm:generation_tokens_total") <= 2 * num_tokens, "replayed tokens are not counted"

    kill(workers.pids)
    num_started = len(workers.decode.started)
    [path, _], events = requests[0], answers[0]
    last_id = events[5][0]
    assert (await resume(workers, path, last_id, "b")).status_code == 404, "another key's"
    assert (await resume(workers, "/v1/chat/completions", last_id)).status_code == 404, "another route's"
    answer = await resume(workers, path, last_id)
    assert answer.status_code == 200
    data = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert data == [one for _, one in events[6:]]
    assert len(workers.decode.started) == num_started, "nothing is computed again"


async def resume(workers: Workers, path: str, last_id: str, key: str = "a") -> httpx.Response:
    """A connection that a dying worker was handed is lost with it; a new worker knows no node yet (Retry-After)."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                async with workers.client(key) as client:
                    response = await client.post(path, headers={"last-event-id": last_id})
                    if response.status_code != 503:
                        return response
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_another_worker_goes_on_at_once_with_the_seed_that_was_drawn(workers: Workers) -> None:
    await workers.until(workers.are_up_and_ready)
    num_before, pids = len(workers.decode.started), workers.pids
    body = {"prompt": "hello", "return_token_ids": True}
    counts = dict.fromkeys(range(NUM_STREAMS), 0)
    streams = [
        asyncio.create_task(follow(workers, "/v1/completions", body, partial(counts.__setitem__, at))) for at in counts
    ]
    workers.decode.behaviour.most_tokens = NUM_TOKENS // 2  # however slow workers and readers are: none ends before
    await workers.until(lambda: min(counts.values()) > 20)
    kill(pids[:1])
    workers.decode.behaviour.most_tokens = None
    answers = await asyncio.gather(*streams)
    started = [one.request for one in workers.decode.started[num_before:]]
    assert len(started) > NUM_STREAMS, "those of the killed worker have gone on elsewhere"
    for one in started[NUM_STREAMS:]:
        begun = next(request for request in started[:NUM_STREAMS] if request.request_id == one.request_id)
        assert one.sampling.seed == begun.sampling.seed
        assert len(unpack_tokens(one.output_token_ids[0])) > 10, "from where it was"
    for events, request in zip(answers, sorted_by_answer(answers, started[:NUM_STREAMS]), strict=True):
        check_is_one_stream(events)
        told = [json.loads(data)["choices"] for _, data in events if data != "[DONE]"]
        token_ids = [one for choices in told for choice in choices for one in choice.get("token_ids", ())]
        prompt = unpack_tokens(request.prompt_token_ids)
        assert token_ids == expected_tokens(prompt, NUM_TOKENS, request.sampling.seed)


def sorted_by_answer(answers: list[list[tuple[str, str]]], requests: list[Any]) -> list[Any]:
    by_id = {request.request_id: request for request in requests}
    return [by_id[events[0][0].rpartition(":")[0]] for events in answers]
