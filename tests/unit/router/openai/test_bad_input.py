"""Fields with wrong values are a 4xx with OpenAI's body, reach no node, and leave the next request healthy."""

import json
from typing import Any

import pytest

from kvasir.router.openai.parsing import UNSUPPORTED
from tests.unit.router.openai.conftest import END, EOS, Router
from tests.unit.router.openai.refusals import check, is_healthy

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("choice", ["maybe", 5, {"type": "function"}, {"type": "function", "name": "a"}, {"type": "x"}])
async def test_a_wrong_tool_choice_is_told_what_is_wanted(router: Router, choice: Any) -> None:
    answers = [(await router.chat(tool_choice=choice), '"function": {"name"')]
    if choice != {"type": "function", "name": "a"}:
        answers.append((await router.post("/v1/responses", input="x", tool_choice=choice), '"function", "name"'))
    for answer, wanted in answers:
        error = check(answer)
        assert error["param"] == "tool_choice"
        assert wanted in error["message"]
        assert all(inside not in error["message"] for inside in ("literal", "union", "discriminator", "Named"))


async def test_nothing_but_ends_and_no_end_allowed(router: Router) -> None:
    error = check(await router.complete(allowed_token_ids=[END, EOS], min_tokens=3))
    assert error["param"] == "allowed_token_ids"
    for body in ({"min_tokens": 0}, {"min_tokens": 3, "ignore_eos": True}):
        assert (await router.complete(allowed_token_ids=[END, EOS], **body)).status_code == 200


BAD_FIELDS: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 2.1, "1", True, [], {})),
    *(("top_p", value) for value in (-0.1, 1.1, "1")),
    *(("top_k", value) for value in (-2, 1.5, 2**31, 10**30, "5")),
    *(("min_p", value) for value in (-1, 2)),
    *(("seed", value) for value in (2**64, -(2**63) - 1, 1.5, "7", 10**40)),
    *(("presence_penalty", value) for value in (2.5, -2.5)),
    *(("frequency_penalty", value) for value in (2.5, "x")),
    *(("repetition_penalty", value) for value in (0, -1, 1000)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "10", True, 2**31, 10**30)),
    *(("min_tokens", value) for value in (-1, 17, "1")),
    *(("n", value) for value in (0, -1, 129, 1.5, "2")),
    *(("stop", value) for value in ("", [""], [1], {}, 5, [None], ["x"] * 65, "x" * 5000)),
    *(("stop_token_ids", value) for value in ([-1], [300], ["1"], [2**31], 5)),
    *(("allowed_token_ids", value) for value in ([], [300], [-1])),
    *(("bad_words", value) for value in ([""], "x", [1], ["x" * 300])),
    *(("logit_bias", {key: 5}) for key in ("191222", "-1", "AI", "", "1.0", "²", "9" * 100)),
    *(("logit_bias", value) for value in ({"5": 1000}, {"5": None}, {"5": "x"}, [], [1], "x", 5)),
    *(("stream", value) for value in ("yes", 1)),
    *(("stream_options", value) for value in ({"include_usage": True}, {"include_usage": 1}, [], "x")),
    *(("user", value) for value in (5, {})),
    *(("metadata", value) for value in (5, "x", [])),
    *(("store", value) for value in (1, "true")),
    *(("service_tier", value) for value in (5, "x" * 65)),
    *(("safety_identifier", 5), ("prompt_cache_key", 5)),
    *(("cache_salt", value) for value in ("", 5, ["x"], "x" * 2000)),
    *(("priority", value) for value in (1.5, "x", 2**31)),
    *(("model", value) for value in (None, 5, ["m"])),
    *(("ignore_eos", value) for value in ("true", 0)),
    *(("tools", value) for value in ([{"type": "function"}], "x", 5)),
    ("tool_choice", "required"),
    ("functions", [{}]),
    *(("response_format", value) for value in ("json", {}, {"type": "xml"}, {"type": "json_schema"}, 5)),
    *(("structured_outputs", value) for value in ({}, "a", {"regex": 5}, {"regex": "a", "choice": ["a"]})),
    ("guided_regex", "a+"),
    ("chat_template", "{{ 1 }}"),
    ("suffix", "x"),
    *(("best_of", value) for value in (0, -1, 129, "2", 1.5)),
    *(("prompt_logprobs", value) for value in (-1, 6, "1", True)),
]


async def test_every_bad_field_is_a_400_on_both_endpoints(router: Router) -> None:
    for name, value in BAD_FIELDS:
        for response in (
            await router.complete(**{name: value}),
            await router.chat(max_completion_tokens=16, **{name: value}),
        ):
            error = check(response)
            assert error["type"] == "invalid_request_error"
            assert error["param"].startswith(name), (name, value, error)
    assert router.dispatcher.requests == []
    assert await is_healthy(router)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"user": 5}, "user", "invalid_type"),
        ({"metadata": "a"}, "metadata", "invalid_type"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ],
    ids=range(7),
)
async def test_codes_say_what_is_wrong(router: Router, body: dict[str, Any], param: str, code: str) -> None:
    error = check(await router.chat(**body))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"max_tokens": 1.5}, "invalid 'max_tokens': it must be an integer, got 1.5"),
        ({"n": True}, "invalid 'n': it must be an integer, got true"),
        ({"temperature": "1"}, "invalid 'temperature': it must be a number, got '1'"),
        ({"model": None}, "invalid 'model': it must be a string, got null"),
        ({"stream": {"a": [None, False]}}, "invalid 'stream': it must be true or false, got {'a': [null, false]}"),
        ({"messages": {}}, "invalid 'messages': it must be a list, got {}"),
        ({"messages": ["hi"]}, "invalid 'messages[0]': it must be an object, got 'hi'"),
        ({"messages": []}, "invalid 'messages': List should have at least 1 item, not 0, got []"),
        ({"logit_bias": [1]}, "invalid 'logit_bias': it must be an object, got [1]"),
    ],
    ids=range(9),
)
async def test_messages_have_the_words_of_json(router: Router, body: dict[str, Any], wanted: str) -> None:
    assert check(await router.chat(**body))["message"] == wanted


async def test_a_whole_number_is_an_integer_however_it_is_written(router: Router) -> None:
    answer = await router.chat(max_tokens=2.0, n=1.0, top_k=-1.0, seed=7.0, priority=-0.0, temperature=1)
    assert answer.status_code == 200
    assert (await router.post("/v1/responses", input="x", max_output_tokens=2.0)).status_code == 200
    assert (await router.complete(prompt=[5, 6.0], allowed_token_ids=[7.0, 8], stop_token_ids=[9.0])).status_code == 200
    assert (await router.complete(prompt=[[1.0], [2, 3.0]])).status_code == 200
    [chat, response, ids, one, two] = router.dispatcher.requests
    assert (chat.sampling.max_tokens, chat.sampling.seed, response.sampling.max_tokens) == (2, 7, 2)
    assert ids.prompt_token_ids == (5, 6)
    assert ids.sampling.allowed_token_ids == (7, 8)
    assert 9 in ids.sampling.stop_token_ids
    assert (one.prompt_token_ids, two.prompt_token_ids) == ((1,), (2, 3))
    assert all(
        type(token_id) is int
        for request in router.dispatcher.requests
        for token_id in (*request.prompt_token_ids, *request.sampling.allowed_token_ids)
    )
    answer = await router.http.post("/detokenize", json={"tokens": [70.0]})
    assert answer.json() == (await router.http.post("/detokenize", json={"tokens": [70]})).json()
    for prompt in ([1.5], [[1.5]], [1.0, "a"], ["a", 1.0], [[1.0], 2.0]):
        assert check(await router.complete(prompt=prompt))["param"] == "prompt"
    assert check(await router.chat(seed=float(2**53)))["param"] == "seed"  # it may have been another one


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 200, "x" * 100_000, [], [[]], "", [""], [1, "a"], [1.5], [[1], "a"], [True], {}, 5, [300], [-1], [10**30],
        [1] * 151, [[1], []], ["a"] * 129, [[[1]]],
    ],
    ids=range(19),
)  # fmt: skip
async def test_bad_prompts(router: Router, prompt: Any) -> None:
    # An empty text is a prompt where the tokenizer adds a BOS, as here it does not.
    error = check(await router.complete(prompt=prompt, add_special_tokens=False))
    assert error["param"] == "prompt"
    assert router.dispatcher.requests == []
    assert await is_healthy(router)


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "hi", [{}], [5], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": "king", "content": "hi"}], [{"role": 5, "content": "hi"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["hi"]}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [IMAGE]}], [{"role": "function", "content": "x", "name": "f"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
        [{"role": "assistant", "content": None, "audio": {"id": "a"}}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}],
        [{"role": "user", "content": "x" * 1000}],
        [{"role": "user", "content": json.loads("[" * 900 + "]" * 900)}],
    ],
    ids=range(23),
)  # fmt: skip
async def test_bad_messages(router: Router, messages: Any) -> None:
    error = check(await router.post("/v1/chat/completions", messages=messages))
    assert error["param"].startswith("messages")
    assert router.dispatcher.requests == []
    assert await is_healthy(router)


async def test_what_excludes_each_other(router: Router) -> None:
    check(await router.chat(continue_final_message=True, add_generation_prompt=True))
    check(await router.chat(top_logprobs=2))
    check(await router.chat(logprobs=True, top_logprobs=6))
    check(await router.complete(logprobs=6))
    check(await router.complete(max_tokens=0))
    check(await router.chat(max_tokens=0))
    check(await router.chat(max_completion_tokens=0))
    check(await router.complete(prompt_logprobs=6))
    check(await router.complete(prompt_logprobs=1, stream=True))
    check(await router.complete(n=3, best_of=2))
    check(await router.complete(best_of=2, stream=True))
    check(await router.complete(prompt=["a", "b"], best_of=65))
    check(await router.complete(max_tokens=5, min_tokens=6))
    check(await router.complete(prompt=["a", "b"], n=65))
    assert router.dispatcher.requests == []


@pytest.mark.parametrize(
    "name",
    [
        *("functions", "suffix", "best_of", "documents", "guided_json", "guided_regex", "guided_choice", "moderation"),
        *("web_search_options", "audio", "logprob_token_ids", "thinking_token_budget"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(router: Router, name: str) -> None:
    error = check(await router.chat(**{name: {"type": "json_schema"}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "not supported" in error["message"]


async def test_an_empty_object_asks_for_a_search(router: Router) -> None:
    """As OpenAI's clients ask for one with the defaults."""
    for name, value in (("web_search_options", {}), ("thinking_token_budget", 0)):
        assert check(await router.chat(**{name: value}))["param"] == name
        assert (await router.chat(**{name: None})).status_code == 200


async def test_what_changes_nothing_is_taken(router: Router) -> None:
    """Also where it would hide how long tokens are, which is OpenAI's default, or holds what a proxy has to say."""
    for value in (True, False):
        response = await router.chat(stream=True, stream_options={"include_obfuscation": value})
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")
    metadata = {"tags": ["a"], "number": 1, "long": "b" * 513} | {str(number): None for number in range(17)}
    for answer in (await router.chat(metadata=metadata), await router.complete(metadata=metadata)):
        assert answer.status_code == 200


async def test_the_unsupported_have_values_that_ask_for_nothing(router: Router) -> None:
    harmless = {"tools": [], "tool_choice": "auto", "best_of": 1, "guided_json": None, "suffix": ""}
    assert harmless.keys() <= UNSUPPORTED.keys()
    assert (await router.complete(**harmless)).status_code == 200


@pytest.mark.parametrize(
    "ask", [{"max_tokens": 10**6}, {"max_tokens": 200}, {"prompt": [1] * 151}, {"prompt": "x " * 500}]
)
async def test_too_long_is_context_length_exceeded(router: Router, ask: dict[str, Any]) -> None:
    for stream in (False, True):
        assert check(await router.complete(stream=stream, **ask))["code"] == "context_length_exceeded"
    assert router.dispatcher.requests == []


async def test_what_the_cache_cannot_hold_ends_early(router: Router) -> None:
    """max_tokens within the model's length but beyond the largest node's cache."""
    assert (await router.complete(prompt=[1] * 150, max_tokens=50)).status_code == 200
    assert (await router.complete(prompt=[1] * 100, max_tokens=100)).status_code == 200
    assert [request.sampling.max_tokens for request in router.dispatcher.requests] == [1, 51]


async def test_missing_and_unknown_models(router: Router) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": "p"})
    assert check(response)["param"] == "model"
    assert check(await router.complete(model="other"), 404)["code"] == "model_not_found"
    assert check(await router.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


async def test_unknown_fields_are_ignored_and_counted(router: Router) -> None:
    before = await router.metric("kvasir:router_unknown_fields_total")
    assert (await router.complete(foo=1, bar={"a": []}, user="me", metadata={})).status_code == 200
    assert await router.metric("kvasir:router_unknown_fields_total") == before + 2
