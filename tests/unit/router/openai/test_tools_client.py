"""Tools and thoughts through the official client, and grammars for them through the compiler that nodes use."""

from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from kvasir.common.grammar import Grammar
from kvasir.router.grammar.sources import choice_grammar, json_schema_grammar
from kvasir.router.grammar.thoughts import behind_thoughts
from kvasir.router.openai.reading import ModelHabits, habits_of
from kvasir.router.text.reasoning import Start
from tests.unit.router.openai.conftest import LIMITS, running_router, saying

WIDE = replace(LIMITS, max_model_len=8000, max_prompt_tokens=7000)
HABITS = ModelHabits(tool_format="hermes", reasoning_format="qwen3")


class Weather(BaseModel):
    """How it is outside."""

    city: str


TOOLS = [openai.pydantic_function_tool(Weather)]
CALLS = (
    "<think>hm</think>So:"
    '<tool_call>{"name": "Weather", "arguments": {"city": "Zürich"}}</tool_call>'
    '<tool_call>{"name": "Weather", "arguments": {"city": "Rom"}}</tool_call>'
)


async def test_whole_streamed_and_parsed() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with running_router(saying(CALLS), habits=HABITS, limits=WIDE) as router:
        client = router.openai.chat.completions
        answer = await client.parse(model="m", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "So:"
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "hm"
        assert [call.function.parsed_arguments for call in message.tool_calls or ()] == [
            Weather(city="Zürich"),
            Weather(city="Rom"),
        ]
        async with client.stream(model="m", messages=messages, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.done") == 2
        calls = final.choices[0].message.tool_calls or ()
        assert [call.function.parsed_arguments for call in calls] == [Weather(city="Zürich"), Weather(city="Rom")]
        # What a model has said can be said back to it, as the client holds it.
        turn: Any = [
            *messages,
            message.model_dump(exclude_none=True, exclude={"parsed"}),
            *({"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls or ()),
        ]
        assert (await client.create(model="m", messages=turn, tools=TOOLS)).choices


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (json_schema_grammar({"type": "object", "properties": {"a": {"enum": ["/"]}}, "required": ["a"]}), '{"a":"/"}'),
        (Grammar("regex", r"a/b\d+"), "a/b12"),
        (Grammar("regex", r"a\/b"), "a/b"),
        (Grammar("regex", r"a\\/b"), r"a\/b"),
        (Grammar("regex", "[/\n]+x\\\n"), "/\nx\n"),
        (choice_grammar(["yes/no", "no"]), "yes/no"),
        (choice_grammar([r"a\/b"]), r"a\/b"),
        (choice_grammar(["\n", "\r\n", "a\nb"]), "a\nb"),
        (choice_grammar(["\n", "\r\n", "a\nb"]), "\r\n"),
        (choice_grammar(["\nx"]), "\nx"),
    ],
)
def test_thoughts_are_free_and_what_follows_is_not(grammar: Grammar, answer: str) -> None:
    accepts = matcher()
    for start, prefix in (
        (Start.THINKING, "so { [ </th \n</think>\n\n"),
        (Start.EITHER, "<think>\nso</think>"),
        (Start.EITHER, ""),
        (Start.ANSWERING, ""),
        (None, ""),
    ):
        whole = behind_thoughts(grammar, start)
        assert accepts(whole, prefix + answer), (start, whole)
        assert not accepts(whole, prefix + "nonsense"), (start, whole)
    assert not accepts(behind_thoughts(grammar, Start.THINKING), answer)


def matcher() -> Any:
    from llguidance import LLMatcher, LLTokenizer

    from tests.unit.router.openai.conftest import TOKENIZER

    tokenizer = LLTokenizer(TOKENIZER._tokenizer.to_str(), eos_token=[260])
    make = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }

    def accepts(grammar: Grammar, text: str) -> bool:
        match = LLMatcher(tokenizer, make[grammar.kind](grammar.source), log_level=0)
        assert not match.is_error(), match.get_error()
        token_ids = tokenizer.tokenize_str(text)
        return bool(match.try_consume_tokens(token_ids) == len(token_ids) and match.is_accepting())

    return accepts


@pytest.mark.parametrize(
    ("template", "options", "habits"),
    [
        ("<tool_call> </think>", {}, ModelHabits(tool_format="hermes", reasoning_format="qwen3")),
        ("plain", {}, ModelHabits()),
        (None, {}, ModelHabits()),
        ("<tool_call> </think>", {"tool_call_parser": "none", "reasoning_parser": "none"}, ModelHabits()),
        ("plain", {"tool_call_parser": "mistral", "reasoning_parser": "deepseek_r1"}, ModelHabits(
            tool_format="mistral", reasoning_format="deepseek_r1")),
        ("<tool_call>", {"enable_auto_tool_choice": False}, ModelHabits()),
    ],
)  # fmt: skip
def test_what_is_known_of_the_model(template: str | None, options: dict[str, Any], habits: ModelHabits) -> None:
    defaults = {"tool_call_parser": "auto", "reasoning_parser": "auto", "enable_auto_tool_choice": True}
    assert habits_of(template, **{**defaults, **options}) == habits
