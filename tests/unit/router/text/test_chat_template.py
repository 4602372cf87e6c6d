"""Templates as transformers sets them up: sandboxed, with its filters and functions."""

from pathlib import Path

import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.router.text.chat_template import Arguments, ChatTemplate, find_template

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
STARTED = [*HI, {"role": "assistant", "content": "Well, "}]


def render(source: str, messages: list[dict[str, str]] = HI, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)  # type: ignore[arg-type]


def test_a_conversation_ends_with_the_generation_prompt() -> None:
    assert render(TEMPLATE) == "<s><user>hi</s>\n<assistant>"
    assert render(TEMPLATE, add_generation_prompt=False) == "<s><user>hi</s>\n"


def test_a_final_message_is_continued_without_its_end_marker() -> None:
    text = render(TEMPLATE, STARTED, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s><user>hi</s>\n<assistant>Well, "


def test_a_template_that_trims_may_still_be_continued() -> None:
    trimming = TEMPLATE.replace("message.content", "message.content | trim")
    text = render(trimming, STARTED, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s><user>hi</s>\n<assistant>Well, "


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="final message"):
        render("{{ messages[0].content }}", STARTED, continue_final_message=True)


def test_transformers_own_functions_are_there() -> None:
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_is_the_clients_fault(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"unsafe|not safe|range|Range"):
        render(source)


def test_a_client_cannot_replace_the_conversation() -> None:
    assert render(TEMPLATE, template_kwargs={"messages": [], "bos_token": "<S>"}) == "<S><user>hi</s>\n<assistant>"


def test_a_template_file_goes_before_the_tokenizers_settings(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}'
    )
    assert find_template(tmp_path) == "d"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "c"}')
    assert find_template(tmp_path) == "c"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert find_template(tmp_path) == "j"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": Arguments({"city": "Zürich", "n": [1]})}}
CALLED = [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    "show",
    [
        "{{ a }}",
        "{{ a | tojson }}",
        "{{ '' ~ a }}",
        "{{ '' + a }}",
        "{{ a + '' }}",
        "{{ a | string }}",
        "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
        '{"city": "{{ a.city }}", "n": {{ a["n"] }}}',
        '{% for k, v in a.items() %}{{ "{" if loop.first else ", " }}"{{ k }}": {{ v | tojson }}{% endfor %}}',
    ],
)
def test_arguments_are_a_mapping_and_a_text_of_json(show: str) -> None:
    """Templates disagree on what they are; each gets single-level JSON."""
    source = "{% set a = messages[-1].tool_calls[0].function.arguments %}" + show
    assert render(source, CALLED) == '{"city": "Zürich", "n": [1]}'


def test_tools_are_there_or_none() -> None:
    assert render("{{ tools is none }}") == "True"
    tool = {"type": "function", "function": {"name": "f"}}
    assert render("{{ tools[0].function.name }}", tools=[tool]) == "f"
    assert render("{{ tools is none }}", template_kwargs={"tools": [tool]}) == "True"
