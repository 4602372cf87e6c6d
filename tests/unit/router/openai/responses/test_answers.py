"""/v1/responses, as the official client reads it and as it is on the wire."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from kvasir.common.errors import NodeUnavailable
from tests.fake_dispatcher import play
from tests.unit.router.openai.conftest import Router, ids, running_router, saying
from tests.unit.router.openai.responses.conftest import CALLS, HABITS, TEXT, TOOLS, WIDE, ask, events_of, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_whole_response(router: Router) -> None:
    answer = (await ask(router, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)).json()
    Response.model_validate(answer)
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "m")
    assert answer["id"].startswith("resp_")
    [message] = answer["output"]
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert message["content"] == [part]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    num_prompt_tokens = len(router.dispatcher.requests[0].prompt_token_ids)
    assert answer["usage"] == {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(ids(TEXT)) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + len(ids(TEXT)) + 1,
    }
    assert (answer["instructions"], answer["metadata"], answer["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
    assert prompt_of(router) == "<s><system>Be brief.<|end|><user>hi<|end|><assistant>"


async def test_events_come_in_openais_order_and_tell_of_the_whole(router: Router) -> None:
    events = events_of(await ask(router, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    whole = (await ask(router)).json()
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    return {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at")} | {
        "output": output
    }


@pytest.mark.parametrize("tokens_a_step", [1, 50])
async def test_thoughts_and_calls_are_items_of_their_own(tokens_a_step: int) -> None:
    async with running_router(saying(CALLS, tokens_a_step=tokens_a_step), habits=HABITS, limits=WIDE) as router:
        whole = (await ask(router, tools=TOOLS)).json()
        Response.model_validate(whole)
        thought, message, first, second = whole["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "I look."
        assert [first["arguments"], second["arguments"]] == ['{"a": "}"}', "{}"]
        assert {item["status"] for item in whole["output"]} == {"completed"}
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(ids("<think>\nHm.\n</think>"))
        events = events_of(await ask(router, tools=TOOLS, stream=True))
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        for index in range(4):
            kinds = [event["type"] for event in events if event.get("output_index") == index]
            assert kinds[0] == "response.output_item.added"
            assert kinds[-1] == "response.output_item.done"
        joined = "".join(
            event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"
        )
        assert joined == '{"a": "}"}{}'


async def test_the_official_client_reads_it() -> None:
    async with running_router(saying(CALLS), habits=HABITS, limits=WIDE) as router:
        response = await router.openai.responses.create(model="m", input="hi", tools=TOOLS)
        assert response.output_text == "I look."
        events = await router.openai.responses.create(model="m", input="hi", tools=TOOLS, stream=True)
        kinds = [event.type async for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        async with router.openai.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
            async for event in stream:
                assert event.type
            final = await stream.get_final_response()
        assert final.output_text == "I look."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


class Person(BaseModel):
    name: str


async def test_the_official_client_parses_structured_output() -> None:
    async with running_router(saying('{"name": "Ann"}'), limits=WIDE) as router:
        response = await router.openai.responses.parse(model="m", input="Who?", text_format=Person)
        assert response.output_parsed == Person(name="Ann")
        grammar = router.dispatcher.requests[0].sampling.grammar
        assert grammar is not None
        assert "name" in grammar.source


async def test_what_is_cut_is_incomplete() -> None:
    async with running_router(saying(CALLS), habits=HABITS, limits=WIDE) as router:
        for max_tokens in range(1, len(ids(CALLS)), 3):
            events = events_of(await ask(router, tools=TOOLS, max_output_tokens=max_tokens, stream=True))
            assert events[-1]["type"] == "response.incomplete"
            response = events[-1]["response"]
            assert (response["status"], response["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
            assert all(item["status"] == "completed" for item in response["output"][:-1])
            opened = [event for event in events if event["type"] == "response.output_item.added"]
            assert len(opened) == len(response["output"])


@pytest.mark.parametrize("tokens_a_step", [1, 3, 50])
@pytest.mark.parametrize("text", ["Hi you.", "<think>Hm.</think>Hi you.", "<thin>"])
async def test_logprobs_are_those_of_the_message(text: str, tokens_a_step: int) -> None:
    """The first token's was once left out, as if it were a thought."""
    async with running_router(saying(text, tokens_a_step=tokens_a_step), habits=HABITS, limits=WIDE) as router:
        include = ["message.output_text.logprobs"]
        whole = (await ask(router, include=include)).json()
        [part] = whole["output"][-1]["content"]
        tokens = [entry["token"] for entry in part["logprobs"]]
        assert "".join(tokens).removesuffix("<|end|>") == part["text"]
        assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == ("think>" in text)


async def test_logprobs(router: Router) -> None:
    include = ["message.output_text.logprobs"]
    whole = (await ask(router, include=include, top_logprobs=2)).json()
    Response.model_validate(whole)
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert logprobs[0]["token"] == "he"
    assert len(logprobs[0]["top_logprobs"]) == 2
    events = events_of(await ask(router, include=include, top_logprobs=2, stream=True))
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == logprobs


async def test_an_error_in_mid_stream_is_raised_by_the_official_client() -> None:
    def breaking(request: Any) -> list[Any]:
        return [*play(ids("hello"), request, finish_reason="stop")[:2], NodeUnavailable("all nodes are gone")]

    async with running_router(breaking) as router:
        events = events_of(await ask(router, stream=True))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"] == "all nodes are gone"
        stream = await router.openai.responses.create(model="m", input="x", stream=True)
        with pytest.raises(openai.APIError, match="all nodes are gone"):
            async for _ in stream:
                pass
        stored = await router.http.get(f"/v1/responses/{events[-1]['response']['id']}")
        assert stored.status_code == 404
