"""Large bodies are read in a process of their own: others go on; what is wrong with one is said as of a small one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.bodies import Bodies
from kvasir.router.openai.conversation import with_plain_texts
from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.parsing import json_object, parse
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.types import RoutedRequest, TokenDelta
from tests.fake_dispatcher import Step
from tests.unit.router.openai.conftest import LIMITS, ids, running_router
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = "word [{ " * 40_000
MAX_TOKENS, MAX_CHARS = 4000, 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bodies() -> AsyncIterator[Bodies]:
    found = Bodies(lambda: (MAX_TOKENS, MAX_CHARS), 1 << 20)
    yield found
    await found.close()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": LONG}], "stop": ["ü\ud7ff"], "unknown": 1}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}] * 5000}),
        (CompletionBody, {"prompt": [[1, 2, 3] * 1000] * 100, "temperature": 0.5}),
        (ResponsesBody, {"input": LONG, "metadata": {"a": "b"}}),
    ],
    ids=["chat", "parts", "ids", "responses"],
)
async def test_they_come_to_the_same(bodies: Bodies, kind: type[Any], fields: dict[str, Any]) -> None:
    data = orjson.dumps({"model": "m", **fields})
    body, num_unknown = parse(json_object(data), kind)
    if isinstance(body, ChatBody):
        body = with_plain_texts(body)
    assert await bodies.parse(data, kind) == (body, num_unknown)
    assert await bodies.json_object(data) == {"model": "m", **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": LONG}], "temperature": 9}, "temperature"),
        ({"messages": [{"role": "nobody", "content": LONG}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": LONG}], "suffix": "x"}, "suffix"),
    ],
)
async def test_the_field_at_fault_is_named(bodies: Bodies, fields: dict[str, Any], param: str) -> None:
    data = orjson.dumps({"model": "m", **fields})
    with pytest.raises(InvalidRequest) as of_process:
        await bodies.parse(data, ChatBody)
    with pytest.raises(InvalidRequest) as of_loop:
        parse(json_object(data), ChatBody)
    assert (str(of_process.value), of_process.value.param, of_process.value.code) == (
        *(str(of_loop.value), param, of_loop.value.code),
    )


@pytest.mark.parametrize(
    "data", [b'{"a": ' + b"1" * 300_000, b"[" + b"0," * 300_000 + b"0]", b'{"a": "\xff' + LONG.encode()]
)
async def test_what_is_no_object_is_refused(bodies: Bodies, data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await bodies.parse(data, ChatBody)
    assert refused.value.code == "invalid_json"


async def test_more_values_than_any_request_has_are_refused(bodies: Bodies) -> None:
    with pytest.raises(InvalidRequest, match="more than 1048576 values"):
        await bodies.parse(orjson.dumps({"metadata": [0] * (1 << 20)}), CompletionBody)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [7] * 200_000}, "prompt"),
        ({"prompt": ["short", "x" * (MAX_CHARS + 1)]}, "prompt"),
        ({"prompt": "x" * (MAX_CHARS + 1)}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * (MAX_CHARS // 2)}] * 3}, "messages"),
        ({"input": "x" * (MAX_CHARS + 1)}, "input"),
    ],
)
async def test_what_no_prompt_may_have_does_not_come_back(bodies: Bodies, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await bodies.json_object(orjson.dumps(fields))
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


async def test_a_process_that_has_died_is_replaced(bodies: Bodies) -> None:
    data = orjson.dumps({"model": "m", "prompt": LONG})
    await bodies.parse(data, CompletionBody)
    assert bodies._process is not None
    await bodies._process.end()
    assert (await bodies.parse(data, CompletionBody))[0].prompt == LONG


async def test_a_stream_gets_its_tokens_while_a_body_of_megabytes_is_read() -> None:
    """21 MB in 185,000 objects, which take the better part of a second: the stream has the loop meanwhile. The process
    that reads them stands still until that has been seen."""

    def slowly(request: RoutedRequest) -> list[Step]:
        steps: list[Step] = []
        for token in ids("abcdefghijklmnopqrstuvwxyz" * 400):
            steps += [0.002, TokenDelta(sequence=0, token_ids=(token,))]
        return [*steps, TokenDelta(sequence=0, token_ids=(), finish_reason="length")]

    part = {"type": "text", "text": "x" * 90}
    large = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [part] * 185_000}]})
    assert len(large) > 20 << 20
    limits = replace(LIMITS, max_model_len=10**6, max_prompt_tokens=10**5)
    async with running_router(slowly, limits=limits, max_request_bytes=32 << 20) as router, asyncio.timeout(120):
        small = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * (1 << 19)}]})
        assert (
            await router.http.post("/v1/chat/completions", content=small)
        ).status_code == 400  # the process is there
        num_events, begun = 0, asyncio.Event()

        async def listen() -> None:
            nonlocal num_events
            async with router.http.stream("POST", "/v1/completions", json=_STREAM) as answer:
                async for line in answer.aiter_lines():
                    num_events += line.startswith("data: ")
                    begun.set()

        listening = asyncio.create_task(listen())
        await begun.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(large)}\r\n\r\n".encode() + large[:-1])
        await writer.drain()
        with _standing_still():
            num_before = num_events
            writer.write(large[-1:])
            answer = asyncio.create_task(reader.readline())
            await until(lambda: num_events >= num_before + 20)
            assert not answer.done()
        assert (await answer).startswith(b"HTTP/1.1 400 ")  # far longer than the model's context
        writer.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


_STREAM = {"model": "m", "prompt": "p", "stream": True, "max_tokens": 20_000, "ignore_eos": True}


@contextmanager
def _standing_still() -> Iterator[None]:
    """The processes that read bodies."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    pids = [int(pid) for pid in children if b"parse_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
