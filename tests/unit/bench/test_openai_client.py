"""Against a server that answers by a script, on a clock that moves by one second whenever it is read."""

import itertools
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvasir.bench.openai_client import Endpoint, Outcome, ask, first_model
from kvasir.bench.workload import Prompt
from tests.unit.bench.scripted_server import WORDS, ScriptedServer

PROMPT = Prompt(content="What is the answer?", num_output_tokens=7)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def ticking() -> Callable[[], float]:
    seconds = itertools.count(100.0)
    return lambda: next(seconds)


def endpoint(scripted: ScriptedServer, **fields: object) -> Endpoint:
    return Endpoint(base_url=scripted.url, model="m", **fields)  # type: ignore[arg-type]


async def test_completion(scripted: ScriptedServer, session: aiohttp.ClientSession) -> None:
    outcome = await ask(session, endpoint(scripted), PROMPT, clock=ticking())
    assert outcome.error == ""
    assert outcome.text == "".join(WORDS)
    assert outcome.num_prompt_tokens == 11
    assert outcome.timeline is not None
    assert outcome.timeline.sent_s == 100.0
    assert outcome.timeline.arrivals_s == (101.0, 102.0, 103.0, 104.0, 105.0)
    assert outcome.timeline.num_output_tokens == 7
    assert scripted.bodies == [
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt": PROMPT.content,
            "max_tokens": 7,
        }
    ]


async def test_chat_does_not_count_the_chunk_that_names_the_speaker(
    scripted: ScriptedServer, session: aiohttp.ClientSession
) -> None:
    outcome = await ask(session, endpoint(scripted, backend="openai-chat"), PROMPT, clock=ticking())
    assert outcome.timeline is not None
    assert len(outcome.timeline.arrivals_s) == len(WORDS)
    assert outcome.timeline.ttft_s == 2.0, "the clock was read for the speaker's chunk, too"
    (body,) = scripted.bodies
    assert body["messages"] == [{"role": "user", "content": PROMPT.content}]
    assert body["max_completion_tokens"] == 7


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize(("num_tokens", "num_arrivals"), [(5, 5), (6, 6), (7, 6)])
async def test_a_last_chunk_without_text_counts_only_if_it_can_be_a_token(
    scripted: ScriptedServer, session: aiohttp.ClientSession, backend: str, num_tokens: int, num_arrivals: int
) -> None:
    """Five chunks have text. The sixth may be a hidden end token, or may just say that the limit was reached."""
    scripted.closes, scripted.num_tokens = True, num_tokens
    outcome = await ask(session, endpoint(scripted, backend=backend), PROMPT)
    assert outcome.timeline is not None
    assert len(outcome.timeline.arrivals_s) == num_arrivals
    assert len(outcome.timeline.itls_s) == num_arrivals - 1


async def test_what_is_added_to_each_request(scripted: ScriptedServer, session: aiohttp.ClientSession) -> None:
    adorned = endpoint(scripted, headers={"X-Tenant": "t"}, extra_body={"top_k": 5}, ignore_eos=True)
    await ask(session, adorned, Prompt(content=(1, 2, 3), num_output_tokens=1))
    (body,), (headers,) = scripted.bodies, scripted.headers
    assert (body["prompt"], body["top_k"], body["ignore_eos"]) == ([1, 2, 3], 5, True)
    assert headers["X-Tenant"] == "t"


@pytest.mark.parametrize(("count_tokens", "expected"), [(None, len(WORDS)), (len, len("".join(WORDS)))])
async def test_a_server_that_does_not_count(
    scripted: ScriptedServer,
    session: aiohttp.ClientSession,
    count_tokens: Callable[[str], int] | None,
    expected: int,
) -> None:
    scripted.says_usage = False
    outcome = await ask(
        session, endpoint(scripted), Prompt(content=(1, 2), num_output_tokens=7, num_tokens=2), count_tokens
    )
    assert outcome.timeline is not None
    assert outcome.timeline.num_output_tokens == expected
    assert outcome.num_prompt_tokens == 2


def failure(outcome: Outcome) -> str:
    assert outcome.timeline is None
    return outcome.error


async def test_every_failure_is_an_outcome(scripted: ScriptedServer, session: aiohttp.ClientSession) -> None:
    scripted.status = 503
    assert "HTTP 503" in failure(await ask(session, endpoint(scripted), PROMPT))
    scripted.status, scripted.ends = 200, False
    assert "broke off" in failure(await ask(session, endpoint(scripted), PROMPT))
    scripted.ends, scripted.fails_within = True, True
    assert "lost a node" in failure(await ask(session, endpoint(scripted), PROMPT))
    nobody = Endpoint(base_url="http://127.0.0.1:9", model="m")
    assert "ClientConnectorError" in failure(await ask(session, nobody, PROMPT))


async def test_token_ids_are_no_chat(scripted: ScriptedServer, session: aiohttp.ClientSession) -> None:
    with pytest.raises(ValueError, match="text"):
        await ask(session, endpoint(scripted, backend="openai-chat"), Prompt(content=(1,), num_output_tokens=1))


async def test_first_model(scripted: ScriptedServer, session: aiohttp.ClientSession) -> None:
    assert await first_model(session, scripted.url, {}) == "scripted"
    with pytest.raises(ValueError, match="cannot learn"):
        await first_model(session, "http://127.0.0.1:9", {})


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_a_whole_answer_comes_at_once(
    scripted: ScriptedServer, session: aiohttp.ClientSession, backend: str
) -> None:
    outcome = await ask(session, endpoint(scripted, backend=backend, streams=False), PROMPT, clock=ticking())
    assert outcome.error == ""
    assert outcome.text == "".join(WORDS)
    assert outcome.num_prompt_tokens == 11
    assert outcome.timeline is not None
    assert outcome.timeline.arrivals_s == (101.0,)
    assert outcome.timeline.num_output_tokens == 7
    assert scripted.bodies[0]["stream"] is False
    assert "stream_options" not in scripted.bodies[0]


@pytest.mark.parametrize("body", ["[1]", "null", "17", "no json", '"text"'])
async def test_a_whole_answer_that_is_no_object_is_an_error(session: aiohttp.ClientSession, body: str) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/completions", nonsense)
    async with TestServer(app) as server:
        outcome = await ask(session, Endpoint(base_url=str(server.make_url("")), model="m", streams=False), PROMPT)
    assert outcome.timeline is None
    assert outcome.error
