"""Long lists in a request are read once, however many prompts it has, and only to their first fault; and not on the
event loop."""

import threading

import pytest
from pydantic import ValidationError

from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.tokens import DetokenizeBody
from tests.unit.router.openai.conftest import TOKENIZER, running_router, saying


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
        for fields in bad:
            with pytest.raises(ValidationError) as raised:
                kind.model_validate(fields)
            assert raised.value.error_count() < 100
