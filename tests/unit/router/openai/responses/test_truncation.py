"""`truncation: "auto"`: what does not fit goes from the beginning, and what instructs stays."""

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from kvasir.router.openai.responses.items import ChatMessage
from kvasir.router.openai.responses.truncation import longest_end
from tests.unit.router.openai.conftest import Router, ids, running_router, saying
from tests.unit.router.openai.responses.conftest import TEXT, ask, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS: Any = [
    {"role": role, "content": f"{role[0]}{number}" + "." * 20} for number in range(4) for role in ("user", "assistant")
]
LAST: Any = {"role": "user", "content": "last"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow() -> AsyncIterator[Router]:
    """200 tokens, 150 of them of the prompt."""
    async with running_router(saying(TEXT)) as router:
        yield router


async def test_the_oldest_turns_go_and_instructions_stay(narrow: Router) -> None:
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": "D"}, *TURNS, LAST],
        "max_output_tokens": 60,
    }
    for given in (body, body | {"truncation": "disabled"}):
        refused = await ask(narrow, **given)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = (await ask(narrow, truncation="auto", **body)).json()
    assert answer["truncation"] == "auto"
    turn = "<user>u3" + "." * 20 + "<|end|><assistant>a3" + "." * 20 + "<|end|>"
    wanted = "<s><system>Be brief.<|end|><system>D<|end|>" + turn + "<user>last<|end|><assistant>"
    assert prompt_of(narrow) == wanted
    assert len(ids(wanted)) + len(ids(turn)) + 60 > 200 - 5, "one turn more would not have fitted"
    path = f"/v1/responses/{answer['id']}/input_items?limit=100"
    assert len((await narrow.http.get(path)).json()["data"]) == len(body["input"])


async def test_what_fits_is_left_as_it_is(narrow: Router) -> None:
    for truncation in (None, "disabled", "auto"):
        await ask(narrow, input=[*TURNS[:2], LAST], truncation=truncation)
        assert prompt_of(narrow).count("<user>") == 2


async def test_a_conversation_goes_on_without_its_beginning(narrow: Router) -> None:
    previous = None
    for number in range(12):
        body = {"input": f"q{number}" + "." * 30, "previous_response_id": previous, "truncation": "auto"}
        response = await ask(narrow, max_output_tokens=40, **body)
        assert response.status_code == 200, response.text
        previous = response.json()["id"]
    assert "<user>q11" in prompt_of(narrow)
    assert "<user>q10" in prompt_of(narrow)
    assert "<user>q0" not in prompt_of(narrow)
    counted = await narrow.post("/v1/responses/input_tokens", input="x" * 60, previous_response_id=previous)
    assert counted.status_code == 400
    body = {"input": "x" * 60, "previous_response_id": previous, "truncation": "auto"}
    counted = await narrow.post("/v1/responses/input_tokens", **body)
    assert counted.json()["input_tokens"] <= 150


@pytest.mark.parametrize(
    "body",
    [
        {"input": [*TURNS, {"role": "user", "content": "x" * 150}]},
        {"input": [*TURNS, LAST], "instructions": "x" * 150},
        {"input": [*TURNS, LAST], "max_output_tokens": 199},
    ],
    ids=["last", "instructions", "output"],
)
async def test_what_cannot_fit_is_refused(narrow: Router, body: dict[str, Any]) -> None:
    narrow.dispatcher.requests.clear()
    error = (await ask(narrow, truncation="auto", **body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in ("input", "max_output_tokens")
    assert narrow.dispatcher.requests == []


def _conversation(rng: random.Random) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for number in range(rng.randint(1, 12)):
        role = rng.choice(["user", "user", "assistant", "system", "calls"])
        if role == "calls":
            calls = [{"id": f"{number}/{at}"} for at in range(rng.randint(1, 3))]
            messages.append({"role": "assistant", "tool_calls": calls, "size": rng.randint(1, 9)})
            messages += [{"role": "tool", "tool_call_id": call["id"], "size": rng.randint(1, 9)} for call in calls]
        else:
            messages.append({"role": role, "size": rng.randint(1, 9)})
    return messages


async def test_it_is_the_longest_end_that_fits() -> None:
    rng = random.Random(5)
    num_cut = 0
    for _ in range(500):
        messages, room = _conversation(rng), rng.randint(1, 60)

        async def fits(some: Sequence[ChatMessage], room: int = room) -> bool:
            return sum(message["size"] for message in some) <= room

        kept = await longest_end(messages, fits)
        users = [at for at, message in enumerate(messages) if at and message["role"] == "user"]
        ends = [[m for at, m in enumerate(messages) if at >= start or m["role"] == "system"] for start in users]
        fitting = [end for end in ends if await fits(end)]
        if kept is None:
            assert not fitting
            continue
        num_cut += 1
        assert await fits(kept)
        assert [m for m in messages if m["role"] == "system"] == [m for m in kept if m["role"] == "system"]
        called = {call["id"] for message in kept for call in message.get("tool_calls", ())}
        assert called == {message["tool_call_id"] for message in kept if message["role"] == "tool"}
        if fitting:
            assert sum(m["size"] for m in kept) == sum(m["size"] for m in fitting[0])
    assert num_cut > 100
