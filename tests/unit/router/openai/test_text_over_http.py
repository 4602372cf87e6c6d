"""Streamed text is the whole's text, whatever stop strings, special tokens and cuts there are."""

import json
from typing import Any

import pytest

from kvasir.router.types import TokenDelta
from tests.unit.router.openai.conftest import END, TOKENIZER, Router, ids, running_router, saying

BOB = "Bob: Hi! Ally said 👩‍👩‍👧 naïve\nAlice: no"


async def both(router: Router, **body: Any) -> tuple[str, str, dict[str, Any]]:
    """Text, finish reason and usage; the streamed ones have been seen to be the same."""
    answer = (await router.complete(max_tokens=120, **body)).json()
    text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    response = await router.complete(max_tokens=120, stream=True, stream_options={"include_usage": True}, **body)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == reason
    assert last["usage"] == answer["usage"]
    return text, reason, answer["usage"]


STOPS: list[tuple[Any, str]] = [
    (None, BOB),
    ([], BOB),
    ("\n", "Bob: Hi! Ally said 👩‍👩‍👧 naïve"),
    (["\n", "Alice:"], "Bob: Hi! Ally said 👩‍👩‍👧 naïve"),
    (["Alice:"], "Bob: Hi! Ally said 👩‍👩‍👧 naïve\n"),
    (["All", "Ally said", "Alice", "\nA"], "Bob: Hi! "),
    (["👩‍👧"], "Bob: Hi! Ally said 👩‍"),
    (["ïv"], "Bob: Hi! Ally said 👩‍👩‍👧 na"),
    (["Alice: nobody"], BOB),
    (["<|end|>"], BOB),
]


@pytest.mark.parametrize("tokens_a_step", [1, 3, 1000])
async def test_stop_strings(tokens_a_step: int) -> None:
    async with running_router(saying(BOB, tokens_a_step=tokens_a_step)) as router:
        for stop, expected in STOPS:
            text, reason, _ = await both(router, stop=stop)
            assert (text, reason) == (expected, "stop"), stop
            assert router.dispatcher.num_running == 0


async def test_a_stop_string_cancels_at_once_and_counts_what_was_generated() -> None:
    async with running_router(saying("ABCDEFGHIJKLM" * 5)) as router:
        text, _, usage = await both(router, stop=["DEFGHIJ"])
        assert text == "ABC"
        assert usage["completion_tokens"] == len("ABCDEFGHIJ")
        assert (router.dispatcher.num_closed_early, router.dispatcher.num_running) == (2, 0)
        text, _, _ = await both(router, stop=["DEFGHIJ"], include_stop_str_in_output=True)
        assert text == "ABCDEFGHIJ"
        assert await router.metric('vllm:request_success_total{finished_reason="stop"') == 4


async def test_held_text_is_not_lost_when_the_limit_cuts_it() -> None:
    async with running_router(saying("ABCDEF")) as router:
        answer = (await router.complete(stop=["DEFX"], max_tokens=5)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ABCDE", "length", None)


async def test_min_tokens_hold_back_stop_strings() -> None:
    async with running_router(saying("a.b.c.")) as router:
        text, _, _ = await both(router, stop=["."], min_tokens=4)
        assert text == "a.b.c"


async def test_special_tokens_are_shown_if_asked_for_and_ignore_eos_goes_on() -> None:
    script = [*ids("a"), END, *ids("b")]

    def steps(request: object) -> list[TokenDelta]:
        reasons = [None] * (len(script) - 1) + ["length"]
        return [TokenDelta(sequence=0, token_ids=(i,), finish_reason=r) for i, r in zip(script, reasons, strict=True)]

    async with running_router(steps) as router:
        assert (await both(router, ignore_eos=True))[:2] == ("ab", "length")
        assert (await both(router, ignore_eos=True, skip_special_tokens=False))[0] == "a<|end|>b"
        text, reason, usage = await both(router, ignore_eos=True, stop=["<|end|>"])
        assert (text, reason, usage["completion_tokens"]) == ("a", "stop", 2)


async def test_an_eos_as_the_very_first_token_is_an_empty_answer() -> None:
    async with running_router(saying("")) as router:
        text, reason, usage = await both(router)
        assert (text, reason, usage["completion_tokens"]) == ("", "stop", 1)


@pytest.mark.parametrize("tail", [b"\xc3", b"\xf0\x9f\x91", b"\xc0\x80", b"\xed\xa0\x80", b"\xff"])
async def test_bytes_that_are_no_text_end_nothing(tail: bytes) -> None:
    token_of = {TOKENIZER.bytes_of(token_id): token_id for token_id in range(256)}
    script = [*ids("ok "), *(token_of[bytes([byte])] for byte in tail)]

    def steps(request: object) -> list[TokenDelta]:
        reasons = [None] * (len(script) - 1) + ["length"]
        return [TokenDelta(sequence=0, token_ids=(i,), finish_reason=r) for i, r in zip(script, reasons, strict=True)]

    async with running_router(steps) as router:
        text, _, _ = await both(router)
        assert text == (b"ok " + tail).decode(errors="replace")


async def test_the_three_forms_of_content_are_one_prompt() -> None:
    async with running_router(saying("x")) as router:
        for content in ("AB", [{"type": "text", "text": "AB"}], [{"type": "text", "text": t} for t in "AB"]):
            for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
                messages = [{"role": role, "content": content} for role in ("developer", "user", "assistant")]
                response = await router.post("/v1/chat/completions", messages=messages, **options)
                assert response.status_code == 200
        prompts = [request.prompt_token_ids for request in router.dispatcher.requests]
        assert prompts[:3] == prompts[3:6] == prompts[6:]
        assert len(set(prompts)) == 3
        bos = ids("<s>")
        expected = [*bos, *ids("<system>AB"), END, *ids("<user>AB"), END, *ids("<assistant>AB")]
        assert list(prompts[2]) == expected
        assert list(prompts[1]) == [*expected, END]
        assert list(prompts[0]) == [*expected, END, *ids("<assistant>")]


async def test_each_way_in_has_exactly_one_bos() -> None:
    [bos] = ids("<s>")
    async with running_router(saying("x")) as router:
        await router.chat()
        await router.complete(prompt="<s><user>hi")
        await router.complete(prompt="hi")
        await router.complete(prompt=ids("hi"))
        await router.complete(prompt="hi", add_special_tokens=False)
    counts = [list(request.prompt_token_ids).count(bos) for request in router.dispatcher.requests]
    assert counts == [1, 1, 1, 0, 0]
