"""Conversations of several responses: what is stored is gone on from, shown, listed in pages and deleted."""

from typing import Any

import openai
import pytest

from tests.unit.router.openai.conftest import Router, ids, running_router, saying
from tests.unit.router.openai.responses.conftest import TEXT, WIDE, ask, events_of, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
