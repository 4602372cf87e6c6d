"""The official client against us: answers, streams, and its own error types."""

import openai
import pytest

from kvasir.common.errors import InvalidRequest, NodeUnavailable, Overloaded
from kvasir.router.types import TokenDelta
from tests.unit.router.openai.conftest import Router, ids, running_router, saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "hi"}


async def test_a_chat_answer(router: Router) -> None:
    answer = await router.openai.chat.completions.create(model="m", messages=[USER])  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "hello wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(router.dispatcher.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len(ids("hello wörld")) + 1


async def test_a_chat_stream(router: Router) -> None:
    stream = await router.openai.chat.completions.create(
        model="m",
        messages=[USER],
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello wörld"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids("hello wörld")) + 1


async def test_a_completion_and_its_stream(router: Router) -> None:
    whole = await router.openai.completions.create(model="m", prompt="p", max_tokens=100)
    stream = await router.openai.completions.create(model="m", prompt="p", max_tokens=100, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text == "hello wörld"


async def test_the_models(router: Router) -> None:
    assert [model.id async for model in await router.openai.models.list()] == ["m", "org/m"]
    assert (await router.openai.models.retrieve("m")).id == "m"
    assert (await router.http.get("/v1/models/org/m")).json()["id"] == "org/m"
    with pytest.raises(openai.NotFoundError):
        await router.openai.models.retrieve("other")


async def test_wrong_fields_are_a_bad_request(router: Router) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.completions.create(model="m", prompt="p", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await router.openai.completions.create(model="other", prompt="p")
    assert missing.value.code == "model_not_found"


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with running_router(saying("x"), api_keys=["right", "also-right"]) as router:
        assert await router.openai.models.list()
        with pytest.raises(openai.AuthenticationError):
            await router.openai.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_cluster_is_503_with_a_time_to_come_back(stream: bool) -> None:
    async with running_router(lambda _: [Overloaded("full", retry_after_s=2.5)]) as router:
        with pytest.raises(openai.InternalServerError) as caught:
            await router.openai.completions.create(model="m", prompt="p", stream=stream)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nodes_refuse_before_the_first_token_has_a_status(stream: bool) -> None:
    refusal = InvalidRequest("too long", "prompt", "context_length_exceeded")
    async with running_router(lambda _: [0.01, refusal]) as router:
        with pytest.raises(openai.BadRequestError, match="too long") as caught:
            await router.openai.completions.create(model="m", prompt="p", stream=stream)
    assert caught.value.code == "context_length_exceeded"


async def test_an_error_in_mid_stream_is_raised_and_no_end_is_made_up() -> None:
    steps = [TokenDelta(sequence=0, token_ids=tuple(ids("ok"))), NodeUnavailable("all nodes are gone")]
    async with running_router(lambda _: steps) as router:
        stream = await router.openai.completions.create(model="m", prompt="p", stream=True)
        [choice] = (await anext(stream)).choices
        assert (choice.text, choice.finish_reason) == ("ok", None)
        with pytest.raises(openai.APIError, match="all nodes are gone"):
            await anext(stream)
        response = await router.complete(stream=True)
        assert response.text.splitlines()[-2].startswith('data: {"error":{"message":"all nodes are gone"')
        assert "[DONE]" not in response.text
        assert (
            await router.metric('kvasir:router_requests_total{endpoint="completions",model_name="m",outcome="error"')
            == 2
        )


async def test_an_error_in_a_whole_answer_has_a_status() -> None:
    steps = [TokenDelta(sequence=0, token_ids=tuple(ids("ok"))), NodeUnavailable("all nodes are gone")]
    async with running_router(lambda _: steps) as router:
        with pytest.raises(openai.InternalServerError, match="all nodes are gone") as caught:
            await router.openai.completions.create(model="m", prompt="p")
        assert caught.value.status_code == 503
