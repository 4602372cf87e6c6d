"""Templates of requests run in a process of their own, which ends in time whatever they do."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import Arguments, ChatTemplate

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi é"}]
OWN = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})


async def test_a_request_may_bring_its_template_where_that_is_trusted() -> None:
    renderer = ChatRenderer(OWN, trusts_requests=True, timeout_s=60)
    assert await renderer.render(HI) == "<s>hi é"
    source = "{{ bos_token }}[{{ messages[0].content }}]{{ x }}{{ tools[0].function.name }}"
    options: dict[str, Any] = {"template_kwargs": {"x": 5}, "tools": [{"function": {"name": "f"}}]}
    assert await renderer.render(HI, template=source, **options) == "<s>[hi é]5f"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": Arguments({"a": "b"})}}
    called = [*HI, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].tool_calls[0].function.arguments }}"
    assert await renderer.render(called, template=source) == 'hi éso{"a": "b"}'
    assert await renderer.render(called, template="{{ messages[-1].content }}!", continue_final_message=True) == "so"
    renderer.close()


async def test_nobody_else_may() -> None:
    with pytest.raises(InvalidRequest, match="trust-request-chat-template"):
        await ChatRenderer(OWN).render(HI, template="x")
    with pytest.raises(InvalidRequest, match="no chat template"):
        await ChatRenderer(None).render(HI)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "is no template"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'x' * 10 ** 11 }}", "memory"),
        ("{% set s = namespace(t='x') %}{% for i in range(60) %}{% set s.t = s.t ~ s.t %}{% endfor %}", "memory"),
        ("x" * (2 << 20), "at most"),
    ],
    ids=range(6),
)
async def test_what_is_wrong_with_it_is_said(source: str, reason: str) -> None:
    renderer = ChatRenderer(OWN, trusts_requests=True, timeout_s=60)
    with pytest.raises(InvalidRequest, match=reason):
        await renderer.render(HI, template=source)
    renderer.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
async def test_one_without_end_is_ended(source: str) -> None:
    renderer = ChatRenderer(OWN, trusts_requests=True, timeout_s=1.0)
    with pytest.raises(InvalidRequest, match="within 1 s"):
        await renderer.render(HI, template=source)
    renderer.close()


async def test_a_long_conversation_is_rendered_in_a_thread() -> None:
    renderer = ChatRenderer(OWN)
    text = "x" * 100_000
    assert await renderer.render([{"role": "user", "content": text}]) == "<s>" + text
    with pytest.raises(InvalidRequest, match="refuses"):
        await ChatRenderer(ChatTemplate("{{ raise_exception('no') }}", {})).render([{"role": "user", "content": text}])
    renderer.close()


async def test_a_requests_own_template_has_the_routers_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "HERE-13")
    renderer = ChatRenderer(OWN, trusts_requests=True, timeout_s=60)
    template = "{{ strftime_now('%H') }}{{ messages | length }}"
    hours = {datetime.now(UTC).astimezone(timezone(timedelta(hours=13))).strftime("%H")}
    text = await renderer.render([{"role": "user", "content": "x"}], template=template)
    hours.add(datetime.now(UTC).astimezone(timezone(timedelta(hours=13))).strftime("%H"))
    assert text in {f"{hour}1" for hour in hours}
    renderer.close()
