"""Long lists in a request are read once, however many prompts it has, and only to their first fault; and not on the
event loop."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.router.openai.completions import CompletionShape
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import prompt_logprobs
from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.prompts import completion_prompts
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.tokens import DetokenizeBody
from tests.unit.router.openai.conftest import LIMITS, TOKENIZER, running_router, saying


async def test_words_that_may_not_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them with 128 prompts once kept all streams waiting for half a minute."""
    encode = TOKENIZER.encode
    seen: list[tuple[str, int]] = []

    def counting(text: str, *, add_special_tokens: bool) -> list[int]:
        seen.append((text, threading.get_ident()))
        return encode(text, add_special_tokens=add_special_tokens)

    words = [f"word {number}" for number in range(100)]
    async with running_router(saying("x")) as router:
        monkeypatch.setattr(TOKENIZER, "encode", counting)
        response = await router.complete(prompt=["one", "three"], bad_words=words, max_tokens=2)
        assert response.status_code == 200, response.text
    of_words = [(text, thread) for text, thread in seen if text.lstrip() in words]
    assert sorted(text for text, _ in of_words) == sorted([*words, *(f" {word}" for word in words)])
    assert threading.get_ident() not in {thread for _, thread in of_words}
    first, second = (request.sampling for request in router.dispatcher.requests)
    assert first.bad_words == second.bad_words != ()
    assert first.seed != second.seed


async def test_each_prompt_has_its_own_room() -> None:
    async with running_router(saying("x")) as router:
        response = await router.complete(prompt=["a", "b" * 100], max_tokens=90)
        assert response.status_code == 200, response.text
        assert [request.sampling.max_tokens for request in router.dispatcher.requests] == [
            90,
            50,
        ]  # the text has a BOS token
        response = await router.complete(prompt=["a", "b" * 100], max_tokens=90, min_tokens=60)
        assert response.status_code == 400, "too little room behind the second"


def test_of_many_faults_only_the_first_is_looked_for() -> None:
    """Telling of 168,000 in a body of 250 KiB once kept all streams waiting for more than a second."""
    calls = {"messages": [{"role": "assistant", "tool_calls": [{}] * 500}] * 100}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{}] * 500}
    for kind in (ChatBody, CompletionBody, ResponsesBody, DetokenizeBody):
        bad = [{name: [{}] * 2000 for name in kind.model_fields}, calls, {"tool_choice": choice}]
        bad.append({name: {str(key): {} for key in range(2000)} for name in kind.model_fields})
        for fields in bad:
            with pytest.raises(ValidationError) as raised:
                kind.model_validate(fields)
            assert raised.value.error_count() < 100


async def test_between_prompts_others_have_their_turn() -> None:
    """128 of 2000 characters once kept all streams waiting for a quarter of a second."""
    body = CompletionBody(model="m", prompt=["x" * 1900] * 128)
    reading = asyncio.create_task(
        completion_prompts(body, TOKENIZER, replace(LIMITS, max_model_len=5000, max_prompt_tokens=4000))
    )
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert len(reading.result()) == 128 <= num_turns


async def test_many_logprobs_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    write = CompletionShape.whole

    def noting(shape: CompletionShape, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return write(shape, index, deltas)

    monkeypatch.setattr(CompletionShape, "whole", noting)
    limits = replace(LIMITS, max_model_len=5000, max_prompt_tokens=4000)
    async with running_router(saying("x"), limits=limits) as router:
        for prompt, n, is_beside in (([5] * 200, 2, False), ([5] * 200, 4, True), ([5] * 1000, 1, True)):
            threads.clear()
            response = await router.complete(prompt=prompt, n=n, echo=True, max_tokens=0, logprobs=1)
            assert response.status_code == 200, response.text
            assert len(threads) == n
            assert (threading.get_ident() not in threads) == is_beside


async def test_a_prompt_is_scored_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(*arguments: Any) -> list[Any]:
        calls.append(1)
        return prompt_logprobs(*arguments)

    monkeypatch.setattr("kvasir.router.openai.chat.prompt_logprobs", counting)
    async with running_router(saying("x")) as router:
        answer = (await router.chat(n=5, prompt_logprobs=1)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(calls) == 1
