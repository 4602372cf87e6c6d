"""Half of a surrogate pair can be written in JSON, but it is no Unicode: it must not come further than the reading."""

import pytest

from kvasir.router.openai.reading import ModelHabits
from tests.unit.router.openai.conftest import running_router, saying

HALF = '{"city": "\\ud800"}'
ASKED = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": HALF}}
MESSAGES = [ASKED, {"role": "assistant", "tool_calls": [CALL]}]
ITEMS = [ASKED, {"type": "function_call", "call_id": "1", "name": "f", "arguments": HALF}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/v1/responses", {"input": ITEMS}),
    ],
)
async def test_arguments_that_come_back_from_a_client_stay_as_they_stand(path: str, body: dict[str, object]) -> None:
    async with running_router(saying("fine")) as router:
        response = await router.post(path, **body)
        assert response.status_code == 200, response.text
        prompt = response.json().get("tokens") or router.dispatcher.requests[0].prompt_token_ids
        said = await router.post("/detokenize", tokens=[*prompt])
        assert HALF in said.json()["prompt"]


@pytest.mark.parametrize("template", ["{{ '\\ud800' }}", "{{ raise_exception('no: \\ud800') }}"])
async def test_a_template_that_makes_one_is_refused(template: str) -> None:
    async with running_router(saying("fine"), trusts_requests=True) as router:
        response = await router.chat(chat_template=template)
        assert response.status_code == 400, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "f", "arguments": "\ud800"}',
        r'{"name": "\ud800", "arguments": {}}',
        '{"name": ' + "[" * 5000 + "]" * 5000 + ', "arguments": {}}',
    ],
)
async def test_a_model_that_writes_what_is_no_call_fails_nothing(call: str, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = f"<tool_call>{call}</tool_call>"
    async with running_router(saying(answer), habits=ModelHabits(tool_format="hermes")) as router:
        response = await router.chat(tools=tools, stream=stream)
        assert response.status_code == 200, response.text
        assert '"error"' not in response.text
