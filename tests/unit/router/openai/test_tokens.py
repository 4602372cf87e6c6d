"""/tokenize and /detokenize show what the generation endpoints do."""

from typing import Any

import pytest

from tests.unit.router.openai.conftest import END, Router, ids

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]


async def tokenize(router: Router, **body: Any) -> dict[str, Any]:
    response = await router.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 200
    return answer


async def test_a_text_and_a_conversation_are_what_the_model_is_given(router: Router) -> None:
    await router.complete(prompt="hello")
    await router.chat()
    completion, chat = ([*request.prompt_token_ids] for request in router.dispatcher.requests)
    assert (await tokenize(router, prompt="hello", model="m"))["tokens"] == completion
    assert (await tokenize(router, prompt="hello", add_special_tokens=False))["tokens"] == ids("hello")
    assert (await tokenize(router, messages=HI))["tokens"] == chat
    assert (await tokenize(router, messages=HI, add_generation_prompt=False))["tokens"][-1] == END
    begun = [*HI, {"role": "assistant", "content": "so"}]
    continued = await tokenize(router, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert continued["tokens"][-2:] == ids("so")
    tool = {"type": "function", "function": {"name": "f"}}
    assert (await tokenize(router, messages=HI, tools=[tool]))["count"] > len(chat)


async def test_tokens_have_names_if_asked_for(router: Router) -> None:
    assert (await tokenize(router, prompt="hello"))["token_strs"] is None
    answer = await tokenize(router, prompt=" wö", return_token_strs=True)
    assert answer["token_strs"] == ["<s>", "Ġw", "Ã", "¶"]


@pytest.mark.parametrize("text", ["hello wörld", "👩‍👩‍👧 日本 e\u0301", " leading", "<s>special<|end|>"])
async def test_there_and_back(router: Router, text: str) -> None:
    tokens = (await tokenize(router, prompt=text, add_special_tokens=False))["tokens"]
    response = await router.http.post("/detokenize", json={"tokens": tokens})
    assert response.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("tokenize", {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue"),
        ("tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [300]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_bad_requests(router: Router, path: str, body: dict[str, Any], param: str) -> None:
    response = await router.http.post(f"/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    for content in (b"", b"[]", b"\xff"):
        assert (await router.http.post(f"/{path}", content=content)).status_code == 400
    assert (await router.http.post(f"/{path}", json={"model": "other", "prompt": "x", "tokens": []})).status_code == 404
