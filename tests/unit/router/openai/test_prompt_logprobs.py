"""What a prompt's own tokens are worth: echoed, in vLLM's shape, and with nothing generated at all."""

import pytest

from tests.unit.router.openai.conftest import Router, ids, running_router, saying
from tests.unit.router.openai.test_shapes import events

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "hello wörld"
LENGTH = len(ids(PROMPT)) + 1  # BOS


async def test_scoring_a_prompt_generates_nothing(router: Router) -> None:
    answer = (await router.complete(prompt=PROMPT, echo=True, max_tokens=0, logprobs=1)).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-1.5] * (LENGTH - 1)
    assert logprobs["top_logprobs"][0] is None
    assert [len(best) for best in logprobs["top_logprobs"][1:]] == [2] * (LENGTH - 1)
    assert [len(values) for values in logprobs.values()] == [LENGTH] * 4
    assert answer["usage"]["completion_tokens"] == 0
    [request] = router.dispatcher.requests
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (0, 1)
    assert (await router.complete(prompt="next")).status_code == 200


async def test_a_prompt_of_one_token_has_one_entry(router: Router) -> None:
    [choice] = (await router.complete(prompt=ids("a"), echo=True, max_tokens=0, logprobs=0)).json()["choices"]
    logprobs = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert choice["logprobs"] == logprobs


async def test_an_echo_goes_on_with_what_is_generated(router: Router) -> None:
    body = {"prompt": ids("hello"), "echo": True, "max_tokens": 3, "logprobs": 0}
    [choice] = (await router.complete(**body)).json()["choices"]
    assert choice["text"] == "hellohello"
    assert choice["logprobs"]["tokens"] == ["he", "ll", "o"] * 2
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.5] * 5]
    assert choice["logprobs"]["text_offset"] == [0, 2, 4, 5, 7, 9]
    chunks = [chunk["choices"][0] for chunk in events(await router.complete(**body, stream=True))]
    assert "".join(chunk["text"] for chunk in chunks) == "hellohello"
    for key, values in choice["logprobs"].items():
        streamed = [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][key]]
        assert streamed == values


async def test_each_choice_echoes_its_prompt_with_its_logprobs(router: Router) -> None:
    answer = (await router.complete(prompt=["a", "hello"], n=2, echo=True, max_tokens=1, logprobs=0)).json()
    counts = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert counts == [3, 3, 5, 5]


async def test_prompt_logprobs_have_vllms_shape(router: Router) -> None:
    answer = (await router.complete(prompt=ids("hell"), prompt_logprobs=2, max_tokens=1)).json()
    [choice] = answer["choices"]
    _, ll = ids("hell")
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert list(second) == [str(ll), str((ll + 1) % 256), str((ll + 2) % 256)]
    assert second[str(ll)] == {"logprob": -1.5, "rank": 2, "decoded_token": "ll"}
    assert [(entry["logprob"], entry["rank"]) for entry in second.values()] == [(-1.5, 2), (-1.5, 1), (-2.5, 2)]
    assert choice["logprobs"] is None
    assert router.dispatcher.requests[0].sampling.logprobs is None
    assert "prompt_logprobs" not in (await router.complete()).json()["choices"][0]


async def test_a_chat_has_them_beside_its_choices(router: Router) -> None:
    answer = (await router.chat(prompt_logprobs=0, n=2)).json()
    [request] = router.dispatcher.requests
    scored = answer["prompt_logprobs"]
    assert len(scored) == len(request.prompt_token_ids)
    assert [list(entry) for entry in scored[1:]] == [[str(token)] for token in request.prompt_token_ids[1:]]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_offsets_count_characters(router: Router) -> None:
    """The two bytes of ö are two tokens: the second begins where the first did."""
    async with running_router(saying("ö!")) as other:
        [choice] = (await other.complete(logprobs=0, max_tokens=3)).json()["choices"]
    assert choice["text"] == "ö!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xb6", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
