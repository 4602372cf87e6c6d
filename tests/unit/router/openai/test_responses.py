"""/v1/responses, as the official client reads it and as it is on the wire."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvasir.common.errors import InvalidRequest, NodeUnavailable
from kvasir.router.openai.reading import ModelHabits
from kvasir.router.openai.responses.references import with_referenced
from kvasir.router.openai.responses.store import MemoryResponseStore, StoredResponse
from tests.fake_dispatcher import play
from tests.unit.router.openai.conftest import LIMITS, TOKENIZER, Router, ids, running_router, saying

HABITS = ModelHabits(tool_format="hermes", reasoning_format="qwen3")
WIDE = replace(LIMITS, max_model_len=8000, max_prompt_tokens=7000)
TEXT = "hello wörld"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}}]
CALLS = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>{"name": "weather", "arguments": {"a": "}"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide_router() -> AsyncIterator[Router]:
    async with running_router(saying(TEXT), limits=WIDE) as router:
        yield router


@pytest.fixture
def router(wide_router: Router) -> Router:
    wide_router.dispatcher.requests.clear()
    return wide_router


def prompt_of(router: Router) -> str:
    return TOKENIZER.decode([*router.dispatcher.requests[-1].prompt_token_ids])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Each is named as its type, numbered, and what the official client's types say."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        event_id, name, data = block.split("\n")
        assert event_id.endswith(f":{number + 1}")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    return events


async def ask(router: Router, **body: Any) -> httpx.Response:
    return await router.post("/v1/responses", **{"input": "hi", **body})


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


async def test_a_conversation_goes_on_where_it_was(router: Router) -> None:
    first = (await ask(router, instructions="Once.")).json()
    second = (await ask(router, input="and?", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(router) == f"<s><user>hi<|end|><assistant>{TEXT}<|end|><user>and?<|end|><assistant>"
    third = events_of(await ask(router, input="so", previous_response_id=second["id"], stream=True, store=False))
    assert prompt_of(router).count(TEXT) == 2
    gone = await ask(router, previous_response_id=third[-1]["response"]["id"])
    assert gone.status_code == 400
    assert gone.json()["error"]["code"] == "previous_response_not_found"
    assert gone.json()["error"]["param"] == "previous_response_id"


async def test_stored_responses_are_shown_and_deleted(router: Router) -> None:
    client = router.openai.responses
    response = await client.create(model="m", input="hi")
    assert (await client.retrieve(response.id)).model_dump() == response.model_dump()
    items = await client.input_items.list(response.id)
    assert [item.type for item in items.data] == ["message"]
    with pytest.raises(openai.BadRequestError):
        await client.cancel(response.id)
    await client.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.delete(response.id)
    assert (await router.http.get("/v1/responses/x?stream=true")).status_code == 400
    allowed = (await router.http.put("/v1/responses/x")).headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "DELETE"}
    other = await client.create(model="m", input="hi")
    assert (await router.http.get(f"/v1/responses/{other.id}/input_items?order=up")).status_code == 400


async def test_input_items_come_in_pages(router: Router) -> None:
    given: Any = [{"type": "message", "role": "user", "content": text, "id": f"msg_{text}"} for text in "abcde"]
    client = router.openai.responses
    response = await client.create(model="m", input=given)
    for order in ("asc", "desc"):
        found = [item.id async for item in client.input_items.list(response.id, limit=2, order=order)]  # type: ignore[arg-type]
        assert found == [f"msg_{text}" for text in ("abcde" if order == "asc" else "edcba")]
    path = f"/v1/responses/{response.id}/input_items"
    page = (await router.http.get(f"{path}?limit=2&order=asc&after=msg_b")).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("msg_c", "msg_d", True)
    page = (await router.http.get(f"{path}?after=msg_a")).json()
    assert (page["data"], page["first_id"], page["has_more"]) == ([], None, False)
    for wrong in ("limit=0", "limit=101", "limit=x", "limit=²", "after=msg_x", "order=up"):
        error = (await router.http.get(f"{path}?{wrong}")).json()["error"]
        assert error["param"] == wrong.partition("=")[0]


async def test_the_tokens_of_an_input_are_counted(router: Router) -> None:
    client = router.openai.responses
    first = await client.create(model="m", input="hi", instructions="be kind")
    count = await client.input_tokens.count(model="m", input="hi", instructions="be kind")
    assert first.usage is not None
    assert count.input_tokens == first.usage.input_tokens
    more = await client.input_tokens.count(model="m", input="on", previous_response_id=first.id)
    assert more.input_tokens > count.input_tokens - len(ids("be kind"))
    assert len(router.dispatcher.requests) == 1, "nothing is generated"
    with pytest.raises(openai.NotFoundError):
        await client.input_tokens.count(model="other", input="hi")
    with pytest.raises(openai.BadRequestError):
        await client.input_tokens.count(model="m")


async def test_an_output_must_be_that_of_a_call(router: Router) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    first = await ask(router, input=[{"role": "user", "content": "hi"}, call])
    assert first.status_code == 200
    assert (await ask(router, input=[output], previous_response_id=first.json()["id"])).status_code == 200
    for items in ([output], [output, call], [call, {**output, "call_id": "c2"}]):
        response = await ask(router, input=items)
        assert response.status_code == 400
        assert "No tool call found for function call output with call_id c" in response.json()["error"]["message"]


async def test_items_are_referred_to_by_their_ids() -> None:
    """Of inputs and outputs, of several responses, with and without a type; as if they were sent again."""
    async with running_router(saying(CALLS), limits=WIDE, habits=HABITS, api_keys=["one", "two"]) as router:
        client = router.openai.responses
        first = await client.create(model="m", input="hi", tools=TOOLS)
        thought, message, call, _ = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}  # type: ignore[union-attr]
        second = await client.create(model="m", input=[call.model_dump(), output])  # type: ignore[list-item, misc]
        [said] = [item async for item in await client.input_items.list(first.id)]
        references = [{"id": item.id} for item in (said, thought, message, call)]
        asked: Any = [*references, output, {"type": "item_reference", "id": second.output[1].id}]
        third = await client.create(model="m", input=asked)
        again = [one.model_dump(exclude_none=True) for one in (thought, message, call)]
        whole: Any = [{"role": "user", "content": "hi"}, *again, output, second.output[1].model_dump(exclude_none=True)]
        await client.create(model="m", input=whole)
        prompts = [request.prompt_token_ids for request in router.dispatcher.requests[-2:]]
        assert prompts[0] == prompts[1]
        items = [item.id async for item in await client.input_items.list(third.id, order="asc")]
        assert items[:4] == [one["id"] for one in references]
        assert len(set(items)) == len(items) == 6
        body = {"model": "m", "input": asked}
        other = {"authorization": "Bearer two"}
        assert (await router.http.post("/v1/responses", json=body, headers=other)).status_code == 404
        unkept = await client.create(model="m", input="hi", store=False)
        for wanted in (unkept.output[0].id, first.output[0].id[:-1] + "9", "msg_1", "msg_" + 32 * "0" + "_0", ""):
            with pytest.raises(openai.NotFoundError) as error:
                await client.create(model="m", input=[{"type": "item_reference", "id": wanted}])
            assert error.value.body == {
                "message": f"Item with id {wanted!r} not found. Items are not persisted when `store` is set to false. "
                "Try again with `store` set to true, or remove this item from your input.",
                "type": "invalid_request_error",
                "param": "input",
                "code": None,
            }


async def test_so_many_responses_may_be_referred_to(router: Router) -> None:
    store = MemoryResponseStore(ttl_s=60, max_bytes=1 << 20)
    items = [{"type": "item_reference", "id": f"msg_{number:032x}_0"} for number in range(129)]
    for item in items:
        response = {"id": f"resp_{item['id'][4:-2]}", "output": [{"id": item["id"], "type": "message"}]}
        await store.put("o", StoredResponse(response, [], []))
    found = await with_referenced(items[:128] * 2, store, "o")
    assert [one["id"] for one in found] == [one["id"] for one in items[:128]] * 2
    with pytest.raises(InvalidRequest, match="more than 128 responses"):
        await with_referenced(items, store, "o")


async def test_what_is_referred_to_is_no_longer_than_what_may_be_sent() -> None:
    """A reference to a long item is short, and there may be thousands of them."""
    store = MemoryResponseStore(ttl_s=60, max_bytes=1 << 22)
    name = f"item_{1:032x}_in0"
    item = {"id": name, "type": "message", "role": "user", "content": "x" * (1 << 20)}
    await store.put("o", StoredResponse({"id": f"resp_{1:032x}", "output": []}, [item], []))
    reference = {"type": "item_reference", "id": name}
    assert await with_referenced([reference] * 31, store, "o") == [item] * 31
    with pytest.raises(InvalidRequest, match="more than 33554432 bytes"):
        await with_referenced([reference] * 10_000, store, "o")


async def test_unknown_fields_are_ignored_and_counted(router: Router) -> None:
    before = await router.metric("kvasir:router_unknown_fields_total")
    for path in ("", "/input_tokens"):
        body = {"model": "m", "input": "hi", "frobnicate": 1, "moderation": {"model": "x"}}
        assert (await router.post(f"/v1/responses{path}", **body)).status_code == 200
    assert await router.metric("kvasir:router_unknown_fields_total") == before + 4


async def test_nobody_finds_what_another_key_has_stored() -> None:
    async with running_router(saying(TEXT), api_keys=["one", "two"]) as router:
        stored = (await ask(router)).json()["id"]
        other = {"authorization": "Bearer two"}
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            response = await router.http.request(method, f"/v1/responses/{stored}{path}", headers=other)
            assert response.status_code == 404
        body = {"model": "m", "input": "hi", "previous_response_id": stored}
        assert (await router.http.post("/v1/responses", json=body, headers=other)).status_code == 400
        assert (await ask(router, previous_response_id=stored)).status_code == 200


async def test_items_of_all_kinds_are_one_conversation() -> None:
    items: list[dict[str, Any]] = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "kind"}],
        },
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    async with running_router(saying("x"), limits=WIDE) as router:
        assert (await ask(router, input=items)).status_code == 200
        assert prompt_of(router) == (
            "<s><system>Be kind<|end|><user>hi<|end|>"
            '<assistant>I look<call>f{"a": 1}<call>g{}<|end|><tool>sun<|end|><tool>rain<|end|><assistant>'
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "message", "role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": {}}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
        ({"input": [{"type": 5}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}]}, "input[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"include": ["nothing"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 20_000}, "input"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
    ids=range(24),
)
async def test_what_cannot_be_had_is_a_400(router: Router, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = await ask(router, stream=stream, **body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert str(error["param"]).startswith(param)
    assert router.dispatcher.requests == []


async def test_what_is_nested_too_deeply_is_a_400(router: Router) -> None:
    """JSON is read deeper than it is written."""
    deep = '{"a": ' * 500 + "1" + "}" * 500
    tool = '{"type": "function", "name": "f", "parameters": DEEP}'
    for field in ('"input": [{"role": "user", "content": "x", "extra": DEEP}]', f'"input": "x", "tools": [{tool}]'):
        content = ('{"model": "m", "tool_choice": "none", ' + field + "}").replace("DEEP", deep)
        response = await router.http.post("/v1/responses", content=content)
        assert response.status_code == 400, response.text


async def test_a_choice_without_tools_is_the_default_one(router: Router) -> None:
    assert (await ask(router, tool_choice="auto", tools=[])).status_code == 200
    assert (await ask(router, tool_choice="required")).status_code == 400


async def test_an_unknown_model_is_a_404(router: Router) -> None:
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.create(model="other", input="x")


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
