"""What a request asks for is what the nodes get, and what it leaves open is OpenAI's default."""

import pytest

from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.parsing import ACCEPTED, UNSUPPORTED
from tests.unit.router.openai.conftest import END, Router, ids

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_prompts_may_be_token_ids_and_are_not_touched(router: Router) -> None:
    await router.complete(prompt=[1, 2, 3])
    await router.complete(prompt=[[1, 2, 3]])
    assert [request.prompt_token_ids for request in router.dispatcher.requests] == [(1, 2, 3)] * 2


async def test_without_a_seed_two_calls_differ(router: Router) -> None:
    for seed in (None, None, 5, 5, -1):
        await router.complete(seed=seed)
    seeds = [request.sampling.seed for request in router.dispatcher.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5, 2**64 - 1]


async def test_null_is_as_good_as_absent(router: Router) -> None:
    fields = CompletionBody.model_fields.keys() | UNSUPPORTED.keys() | ACCEPTED
    names = fields - {"model", "prompt"}
    plain = (await router.complete()).json()["choices"]
    assert (await router.complete(**dict.fromkeys(names))).json()["choices"] == plain
    [first, second] = router.dispatcher.requests
    assert first.sampling.max_tokens == second.sampling.max_tokens == 16
    fields = ChatBody.model_fields.keys() | UNSUPPORTED.keys() | ACCEPTED
    assert (await router.chat(**dict.fromkeys(fields - {"model", "messages"}))).status_code == 200


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_sampling_reaches_the_nodes(router: Router, ask: str) -> None:
    await getattr(router, ask)(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=3,
        repetition_penalty=1.5, logit_bias={"5": -100, "7": 1.5}, min_tokens=2, max_tokens=9, stop_token_ids=[11],
        allowed_token_ids=[9, 5, 9], bad_words=["ab"], cache_salt="salt", priority=-3,
    )  # fmt: skip
    [request] = router.dispatcher.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == ((5, -100), (7, 1.5))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (2, 9, 3)
    assert sampling.allowed_token_ids == (5, 9)
    assert sampling.bad_words == (tuple(ids("ab")), tuple(ids(" ab")))
    assert (request.cache_salt, request.priority) == ("salt", -3)
    tokenizer_eos = ids("</s>")[0]
    assert sampling.stop_token_ids == {11, END, tokenizer_eos}


async def test_a_token_has_one_bias(router: Router) -> None:
    """Nodes count on it: on a GPU, of two the one or the other would be added."""
    await router.complete(logit_bias={"5": 1, "7": 2, "05": 3})
    assert router.dispatcher.requests[0].sampling.logit_bias == ((5, 3), (7, 2))


async def test_ignore_eos_ignores_them_all(router: Router) -> None:
    await router.complete(ignore_eos=True, stop_token_ids=[11])
    assert router.dispatcher.requests[0].sampling.stop_token_ids == {11}


async def test_defaults_are_openais(router: Router) -> None:
    await router.complete()
    sampling = router.dispatcher.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert sampling.logprobs is None
    await router.complete(temperature=1e-9, top_p=0)
    assert router.dispatcher.requests[1].sampling.temperature == 0
    assert router.dispatcher.requests[1].sampling.top_p > 0
