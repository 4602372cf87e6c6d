"""What /v1/responses cannot give is a 400 that names the field, and reaches no node."""

from typing import Any

import openai
import pytest

from tests.unit.router.openai.conftest import Router
from tests.unit.router.openai.responses.conftest import ask

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_unknown_fields_are_ignored_and_counted(router: Router) -> None:
    before = await router.metric("kvasir:router_unknown_fields_total")
    for path in ("", "/input_tokens"):
        body = {"model": "m", "input": "hi", "frobnicate": 1, "personality": "friendly"}
        assert (await router.post(f"/v1/responses{path}", **body)).status_code == 200
    assert await router.metric("kvasir:router_unknown_fields_total") == before + 4


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
        ({"truncation": "middle"}, "truncation"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"include": ["nothing"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 20_000}, "input"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 7}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        (
            {
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": 5}}],
                "tool_choice": "required",
            },
            "tools[0].parameters",
        ),
    ],
    ids=range(35),
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
