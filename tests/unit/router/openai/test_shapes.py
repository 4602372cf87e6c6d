"""The JSON on the wire, key by key: what the official client forgives, others do not."""

import json
from typing import Any

import httpx
import pytest

from tests.unit.router.openai.conftest import END, Router, ids, running_router, saying

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "hello wörld"
NUM_TOKENS = len(ids(TEXT)) + 1  # the end token is generated too


def events(response: httpx.Response) -> list[Any]:
    """Every event has its number, and is one line of JSON; the last is [DONE]."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    ids, lines = zip(*(block.split("\n") for block in blocks), strict=True)
    assert [int(line.rsplit(":", 1)[1]) for line in ids] == list(range(1, len(ids) + 1))
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ended(finish_reason: str = "stop", stop_reason: str | int | None = None) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "stop_reason": stop_reason}


async def test_chat_chunks(router: Router) -> None:
    chunks = events(await router.chat(stream=True))
    whole = (await router.chat()).json()
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices[:-1])
    assert set(choices[-1]) == {"index", "delta", "logprobs", "finish_reason", "stop_reason"}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    assert all("tool_calls" not in choice["delta"] for choice in choices)
    assert (
        "".join(choice["delta"].get("content", "") for choice in choices) == whole["choices"][0]["message"]["content"]
    )
    assert {(chunk["object"], chunk["id"], chunk["model"]) for chunk in chunks} == {
        ("chat.completion.chunk", chunks[0]["id"], "m")
    }
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_whole_chat_answer(router: Router) -> None:
    answer = (await router.chat()).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"}
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, **ended()}]
    [request] = router.dispatcher.requests
    assert answer["usage"] == {
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": NUM_TOKENS,
        "total_tokens": len(request.prompt_token_ids) + NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_chunks_say_what_whole_answers_say(router: Router, ask: str) -> None:
    post = getattr(router, ask)
    whole = (await post()).json()
    for chunk in events(await post(stream=True, stream_options={"include_usage": True})):
        assert set(chunk) == set(whole)
        for name in ("model", "service_tier", "system_fingerprint"):
            assert chunk[name] == whole[name]


@pytest.mark.parametrize(
    ("roles", "options", "is_echoed"),
    [
        (["user", "assistant"], {}, True),
        (["user", "assistant"], {"continue_final_message": True}, True),
        (["assistant", "user"], {}, False),
        (["user"], {"continue_final_message": True}, True),
        (["user"], {"add_generation_prompt": False}, True),
    ],
)
async def test_a_chats_echo_is_the_message_that_the_answer_belongs_to(
    router: Router, roles: list[str], options: dict[str, Any], is_echoed: bool
) -> None:
    parts = [{"type": "text", "text": "so "}, {"type": "text", "text": "far "}]
    messages = [{"role": role, "content": parts} for role in roles]
    expected = ("so far " if is_echoed else "") + TEXT
    body = {"model": "m", "messages": messages, "echo": True, "n": 2, **options}
    answer = (await router.post("/v1/chat/completions", **body)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected] * 2
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    said = ["", ""]
    for chunk in events(await router.post("/v1/chat/completions", **body, stream=True)):
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
    assert said == [expected] * 2


async def test_a_whole_completion_and_its_chunks(router: Router) -> None:
    answer = (await router.complete(max_tokens=50)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, **ended()}]
    chunks = events(await router.complete(max_tokens=50, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(set(choice) == {"index", "text", "logprobs", "finish_reason"} for choice in choices[:-1])
    assert set(choices[-1]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


@pytest.mark.parametrize(
    ("body", "finish_reason", "stop_reason"),
    [
        ({}, "stop", None),
        ({"stop": ["x", "wö"]}, "stop", "wö"),
        ({"stop_token_ids": [END]}, "stop", END),
        ({"max_tokens": 2}, "length", None),
    ],
)
async def test_what_has_stopped_it(router: Router, body: Any, finish_reason: str, stop_reason: Any) -> None:
    for ask in (router.chat, router.complete):
        asked = {"max_tokens": 50, **body}
        [choice] = (await ask(**asked)).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
        last = events(await ask(stream=True, **asked))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (finish_reason, stop_reason)


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_usage_comes_in_one_last_chunk_if_asked_for(router: Router, ask: str) -> None:
    post = getattr(router, ask)
    chunks = events(await post(stream=True, max_tokens=50, stream_options={"include_usage": True}))
    whole = (await post(max_tokens=50)).json()
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for options in ({}, {"include_usage": False}, None):
        chunks = events(await post(stream=True, stream_options=options))
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


async def test_usage_may_be_had_all_along(router: Router) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await router.complete(stream=True, max_tokens=50, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, NUM_TOKENS)


async def test_usage_all_along_is_each_choices_own_and_at_the_end_that_of_all(router: Router) -> None:
    """As vLLM tells it. A chunk said what all choices had together, and with which of their prompts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = {"a": 2, "bbb": 4}  # tokens: one stands in front
    body = {"prompt": [*prompts], "n": 2, "stream": True, "max_tokens": 50, "stream_options": options}
    *chunks, last = events(await router.complete(**body))
    for index in range(4):
        told = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, NUM_TOKENS)
        assert {usage["prompt_tokens"] for usage in told} == {[*prompts.values()][index // 2]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in told)
    assert last["usage"]["completion_tokens"] == 4 * NUM_TOKENS
    assert last["usage"]["prompt_tokens"] == sum(prompts.values())
    opening = events(await router.chat(stream=True, max_tokens=50, stream_options=options))[0]
    assert opening["usage"]["completion_tokens"] == 0, "a role is no token"


async def test_the_limit_is_a_finish_reason_and_the_default_is_16() -> None:
    async with running_router(saying("a" * 100)) as router:
        [choice] = (await router.complete()).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a" * 16, "length")
        answer = (await router.chat()).json()  # a chat may take all that fits
        assert len(answer["choices"][0]["message"]["content"]) == 100
        assert (await router.chat(max_completion_tokens=3, max_tokens=50)).json()["usage"]["completion_tokens"] == 3


async def test_chat_logprobs(router: Router) -> None:
    answer = (await router.chat(logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == NUM_TOKENS
    he, partial = content[0], next(entry for entry in content if entry["bytes"] == [0xC3])
    assert (he["token"], he["logprob"], he["bytes"]) == ("he", -1.5, [104, 101])
    assert [best["logprob"] for best in he["top_logprobs"]] == [-1.5, -2.5]
    assert partial["token"] == "\\xc3"
    chunks = events(await router.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content
    plain = (await router.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


async def test_completion_logprobs(router: Router) -> None:
    [choice] = (await router.complete(logprobs=2, max_tokens=4)).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["he", "ll", "o", " w"]
    assert logprobs["token_logprobs"] == [-1.5] * 4
    assert logprobs["text_offset"] == [0, 2, 4, 5]
    assert [len(best) for best in logprobs["top_logprobs"]] == [3] * 4
    assert logprobs["top_logprobs"][0]["he"] == -1.5
    chunks = events(await router.complete(logprobs=2, max_tokens=4, stream=True))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]]
    assert [offset for some in offsets for offset in some] == [0, 2, 4, 5]


async def test_several_prompts_and_n_give_choices_in_their_order(router: Router) -> None:
    answer = (await router.complete(prompt=["a", "b"], n=2, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4  # BOS and one byte, each prompt once
    requests = sorted(router.dispatcher.requests, key=lambda request: request.request_id)
    assert [request.prompt_token_ids[-1] for request in requests] == [ids("a")[0], ids("b")[0]]
    assert [(request.num_sequences, request.sampling.seed) for request in requests] == [(2, 7)] * 2
    chunks = events(await router.complete(prompt=["a", "b"], n=2, stream=True))
    for index in range(4):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == TEXT
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


async def test_echo_and_token_ids(router: Router) -> None:
    [choice] = (await router.complete(prompt="ab", echo=True, max_tokens=2, return_token_ids=True)).json()["choices"]
    assert choice["text"] == "abhell"
    assert choice["token_ids"] == ids("hell")
    assert choice["prompt_token_ids"] == list(router.dispatcher.requests[0].prompt_token_ids)
    chunks = events(await router.complete(prompt=ids("ab"), echo=True, max_tokens=2, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abhell"
    answer = (await router.chat(return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == [*ids(TEXT), END]
    assert answer["prompt_token_ids"] == list(router.dispatcher.requests[-1].prompt_token_ids)
    chunks = events(await router.chat(return_token_ids=True, stream=True))
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [*ids(TEXT), END]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        answer["prompt_token_ids"]
    ]


async def test_stream_headers(router: Router) -> None:
    async with router.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "m", "prompt": "p", "stream": True},
        headers={"accept-encoding": "gzip"},
    ) as response:
        headers = response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in headers["cache-control"]
        assert headers["x-accel-buffering"] == "no"
        assert "content-length" not in headers
        assert "content-encoding" not in headers
