"""What a chat template is given of a request."""

import threading
from typing import Any

import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai import conversation
from kvasir.router.openai.conversation import rendered_chat
from kvasir.router.openai.models import ChatBody
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import ChatTemplate


async def rendered(source: str, **fields: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    text, _ = await rendered_chat(ChatBody.model_validate(body), ChatRenderer(ChatTemplate(source, {})))
    return text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "-"),
        ({"reasoning_effort": "low"}, "low-"),
        ({"reasoning_effort": "none"}, "none-False"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none-True"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high-"),
    ],
)
async def test_how_much_to_think_is_for_the_template_to_say(fields: dict[str, Any], expected: str) -> None:
    assert await rendered("{{ reasoning_effort }}-{{ enable_thinking }}", **fields) == expected


async def test_thoughts_of_earlier_answers_are_there_under_one_name() -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}"
    messages = [{"role": "assistant", "content": "a", name: "hm"} for name in ("reasoning", "reasoning_content")]
    assert await rendered(source, messages=[*messages, {"role": "user", "content": "x"}]) == "[hm][hm][]"


def calls_of(*arguments: str) -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]


async def test_long_arguments_are_not_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine million empty lists in one call once kept all streams waiting for eight seconds."""
    read = conversation._arguments
    threads: set[int] = set()

    def noting(text: str) -> Any:
        threads.add(threading.get_ident())
        return read(text)

    monkeypatch.setattr(conversation, "_arguments", noting)
    source = "{{ messages[1].tool_calls[0].function.arguments is mapping }}"
    assert await rendered(source, messages=calls_of('{"a": 1}')) == "True"
    assert threads == {threading.get_ident()}
    threads.clear()
    assert await rendered(source, messages=calls_of('{"a": [' + "[]," * 30_000 + "1]}")) == "True"
    assert await rendered(source, messages=calls_of('{"a": [' + "[]," * 300_000 + "1]}")) == "False", "it stays a text"
    assert threads
    assert threading.get_ident() not in threads
    with pytest.raises(InvalidRequest, match="all calls"):
        await rendered(source, messages=calls_of(*["x" * 500_000] * 10))


async def test_what_the_official_client_gives_back_of_an_answer_is_read_as_it_was() -> None:
    """It sends null for whatever a message has not; one that was refused has no content."""
    nulls = {"annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    messages = [
        {"role": "assistant", "content": "a", "refusal": None, **nulls},
        {"role": "assistant", "content": None, "refusal": "no", **nulls},
    ]
    assert await rendered("{% for m in messages %}[{{ m.content }}]{% endfor %}", messages=messages) == "[a][no]"
