"""Items are referred to by their ids, as if they were sent again."""

from typing import Any

import openai
import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.responses.references import with_referenced
from kvasir.router.openai.responses.store import MemoryResponseStore, StoredResponse
from tests.unit.router.openai.conftest import Router, running_router, saying
from tests.unit.router.openai.responses.conftest import CALLS, HABITS, TOOLS, WIDE

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        await store.put("o", StoredResponse.of(response, [], []))
    found = await with_referenced(items[:128] * 2, store, "o")
    assert [one["id"] for one in found] == [one["id"] for one in items[:128]] * 2
    with pytest.raises(InvalidRequest, match="more than 128 responses"):
        await with_referenced(items, store, "o")


async def test_what_is_referred_to_is_no_longer_than_what_may_be_sent() -> None:
    """A reference to a long item is short, and there may be thousands of them."""
    store = MemoryResponseStore(ttl_s=60, max_bytes=1 << 22)
    name = f"item_{1:032x}_in0"
    item = {"id": name, "type": "message", "role": "user", "content": "x" * (1 << 20)}
    await store.put("o", StoredResponse.of({"id": f"resp_{1:032x}", "output": []}, [item], []))
    reference = {"type": "item_reference", "id": name}
    assert await with_referenced([reference] * 30, store, "o") == [item] * 30
    with pytest.raises(InvalidRequest, match="more than 33554432 bytes"):
        await with_referenced([reference] * 10_000, store, "o")


async def test_what_is_read_for_references_is_bounded() -> None:
    """Of each response a short item, beside a long one."""
    store = MemoryResponseStore(ttl_s=60, max_bytes=1 << 26)
    references = []
    for number in range(40):
        short, long = (
            {"id": f"item_{number:032x}_in{at}", "content": "x" * size} for at, size in ((0, 1), (1, 1 << 20))
        )
        await store.put("o", StoredResponse.of({"id": f"resp_{number:032x}", "output": []}, [short, long], []))
        references.append({"type": "item_reference", "id": short["id"]})
    assert len(await with_referenced(references[:31], store, "o")) == 31
    with pytest.raises(InvalidRequest, match="more than 33554432 bytes"):
        await with_referenced(references, store, "o")
