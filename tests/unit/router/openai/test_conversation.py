"""What a chat template is given of a request."""

from typing import Any

import pytest

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
