"""Calls of tools over HTTP: streamed or whole they are the same, wherever the answer is cut."""

from typing import Any

import pytest

from tests.unit.router.openai.calling import CALLS, CITY, HABITS, HERMES, TOOLS, both, chunks_of, tool_router
from tests.unit.router.openai.conftest import ids, saying


@pytest.mark.parametrize("tokens_a_step", [1, 50, 1000])
async def test_two_calls(tokens_a_step: int) -> None:
    async with tool_router(saying(HERMES, tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router, tools=TOOLS) == ("Let me look.", CALLS, "tool_calls", "")
        assert await both(router, tools=TOOLS, parallel_tool_calls=False) == (
            "Let me look.",
            CALLS[:1],
            "tool_calls",
            "",
        )
        assert router.dispatcher.num_running == 0
        # Nobody looks for calls where there can be none.
        assert (await both(router))[:3] == (HERMES, [], "stop")
        assert (await both(router, tools=TOOLS, tool_choice="none"))[:3] == (HERMES, [], "stop")


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    async with tool_router(saying(HERMES.partition("\n")[2]), habits=HABITS) as router:
        message = (await router.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])


ASKED: list[tuple[Any, str]] = [
    ("auto", HERMES),
    ("required", f'[{{"name": "weather", "parameters": {CITY}}}, {{"name": "time", "parameters": {{}}}}]'),
    ({"type": "function", "function": {"name": "weather"}}, CITY),
]


@pytest.mark.parametrize(("tool_choice", "text"), ASKED, ids=["auto", "required", "named"])
async def test_an_answer_may_be_cut_anywhere(tool_choice: Any, text: str) -> None:
    # A call of a function that the client has named ends with `stop`, at OpenAI and with vLLM.
    expected, whole = ([("weather", CITY)], "stop") if isinstance(tool_choice, dict) else (CALLS, "tool_calls")
    async with tool_router(saying(text), habits=HABITS) as router:
        for max_tokens in [*range(1, 41), *range(41, len(ids(text)), 7)]:
            content, calls, reason, _ = await both(router, tools=TOOLS, tool_choice=tool_choice, max_tokens=max_tokens)
            assert "Let me look.".startswith(content.rstrip())
            for (name, arguments), (wanted_name, wanted_arguments) in zip(calls, expected, strict=False):
                assert name == wanted_name
                assert wanted_arguments.startswith(arguments.rstrip("\ufffd"))
            assert calls == expected if reason == whole else reason == "length"
        assert (await both(router, tools=TOOLS, tool_choice=tool_choice))[1:3] == (expected, whole)


async def test_a_call_that_never_ends_is_not_reported_as_one() -> None:
    async with tool_router(saying('<tool_call>{"name": "weather", "arguments": {"city": "'), habits=HABITS) as router:
        content, calls, reason, _ = await both(router, tools=TOOLS)
        assert (content, calls, reason) == ("", [("weather", '{"city": "')], "stop")


async def test_without_a_call_nothing_ends_for_calls() -> None:
    """A call was wanted and none came: once that was an empty list of calls with their finish reason."""
    async with tool_router(saying("[]"), habits=HABITS) as router:
        assert (await both(router, tools=TOOLS, tool_choice="required"))[1:3] == ([], "stop")
        message = (await router.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]["message"]
        assert "tool_calls" not in message


async def test_each_choice_makes_calls_of_its_own() -> None:
    async with tool_router(saying(HERMES), habits=HABITS) as router:
        whole = (await router.chat(tools=TOOLS, n=2)).json()["choices"]
        assert [choice["finish_reason"] for choice in whole] == ["tool_calls"] * 2
        ids_of_calls = [call["id"] for choice in whole for call in choice["message"]["tool_calls"]]
        assert len(set(ids_of_calls)) == 4
        chunks = chunks_of(await router.chat(tools=TOOLS, n=2, parallel_tool_calls=False, stream=True))
        for index in range(2):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]
            assert "".join(piece["function"]["arguments"] for piece in pieces) == CITY
            assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_stop_string_within_a_call_leaves_no_markup() -> None:
    async with tool_router(saying(HERMES), habits=HABITS) as router:
        assert (await both(router, tools=TOOLS, stop=['"name"']))[:3] == ("Let me look.", [], "stop")
        assert (await both(router, tools=TOOLS, stop=["ich"]))[:3] == (
            "Let me look.",
            [("weather", '{"city": "Zür')],
            "stop",
        )


THINKING = "<think>\nWell, {1}\n</think>\n\n"


@pytest.mark.parametrize("tokens_a_step", [1, 50])
async def test_thoughts_calls_and_their_tokens(tokens_a_step: int) -> None:
    async with tool_router(saying(THINKING + HERMES, tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router, tools=TOOLS) == ("Let me look.", CALLS, "tool_calls", "Well, {1}")
        answer = (await router.chat(tools=TOOLS)).json()
        num_thought = len(ids("<think>\nWell, {1}\n</think>"))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        hidden = (await router.chat(tools=TOOLS, include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning" not in hidden
        assert hidden["content"] == "Let me look."
    async with tool_router(saying(THINKING + "Hello.", tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router) == ("Hello.", [], "stop", "Well, {1}")
        content, _, reason, thought = await both(router, max_tokens=12)
        assert (content, reason) == ("", "length")
        assert "Well, {1}".startswith(thought)
        message = (await router.chat(max_tokens=12)).json()["choices"][0]["message"]
        assert message["content"] is None


@pytest.mark.parametrize("tokens_a_step", [1, 50])
async def test_thoughts_whose_text_comes_with_the_end_alone_count_all_the_same(tokens_a_step: int) -> None:
    """All of it may become a stop string, until there is no more."""
    async with tool_router(saying("<think>Hm", tokens_a_step=tokens_a_step), habits=HABITS) as router:
        answer = (await router.chat(stop=["<think>Hmm"])).json()
        assert answer["choices"][0]["message"]["reasoning"] == "Hm"
        num_tokens = answer["usage"]["completion_tokens"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


@pytest.mark.parametrize("tokens_a_step", [1, 2, 50])
@pytest.mark.parametrize("text", ["Hello.", " <thin ice>", "\n\n<t"])
async def test_what_has_no_thoughts_has_no_tokens_of_them(text: str, tokens_a_step: int) -> None:
    """The first token of an answer was once counted as a thought, for it may be the beginning of one."""
    async with tool_router(saying(text, tokens_a_step=tokens_a_step), habits=HABITS) as router:
        answer = (await router.chat()).json()
        assert answer["choices"][0]["message"]["content"] == text
        assert "completion_tokens_details" not in answer["usage"]
