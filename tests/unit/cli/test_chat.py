"""Against the server that answers by a script."""

import asyncio
import io
import sys

import pytest

from kvasir.bench.timeline import Timeline
from kvasir.cli.chat import describe, main, talk
from kvasir.cli.conversation import Conversation, _message_of
from tests.unit.bench.scripted_server import WORDS, ScriptedServer

ANSWER = "".join(WORDS)


def conversation(scripted: ScriptedServer, **fields: object) -> Conversation:
    return Conversation(url=scripted.url, model="m", **fields)  # type: ignore[arg-type]


async def in_thread(conversation: Conversation, *lines: str) -> int:
    """The chat has event loops of its own, and the server needs ours."""
    return await asyncio.wait_for(asyncio.to_thread(talk, conversation, lines), 60)


async def test_each_turn_carries_what_was_said_before(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await in_thread(conversation(scripted, system="Be brief."), "one", "", "two", "/exit", "three") == 0
    first, second = (body["messages"] for body in scripted.bodies)
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "two"}]
    printed = capsys.readouterr().out
    assert printed.count(ANSWER) == 2
    assert printed.count("(7 tokens)]") == 2, "as many as the server counted"


async def test_a_new_conversation_forgets(scripted: ScriptedServer) -> None:
    await in_thread(conversation(scripted), "one", "/new", "two")
    assert [len(body["messages"]) for body in scripted.bodies] == [1, 1]


async def test_an_unknown_command_is_answered_with_help(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    await in_thread(conversation(scripted), "/what")
    assert "/exit" in capsys.readouterr().out
    assert scripted.bodies == []


async def test_an_error_is_told_and_the_turn_is_taken_back(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.status = 503
    talking = conversation(scripted)
    assert await in_thread(talking, "one") == 1
    assert capsys.readouterr().err == "\nerror: HTTP 503: scripted\n"
    assert talking.messages == []
    scripted.status = 200
    assert await in_thread(talking, "one") == 0


@pytest.mark.parametrize("body", ["<html>no", "[]", '{"error": "no"}'])
def test_what_is_no_openai_error_is_shown_as_it_is(body: str) -> None:
    assert _message_of(body) == body


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_thoughts_are_shown_but_no_part_of_what_is_said(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    scripted.thoughts = ("Hm", ", so")
    talking = conversation(scripted)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    await in_thread(talking, "one")
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[2mHm\x1b[0m\x1b[2m, so\x1b[0m\n\nThe" if is_terminal else "The")
    assert talking.messages[-1] == {"role": "assistant", "content": ANSWER}


async def test_an_answer_that_was_cut_says_so(scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.closes = True
    await in_thread(conversation(scripted), "one")
    assert "(7 tokens), cut at --max-tokens]" in capsys.readouterr().out


async def test_what_came_before_an_error_within_the_stream_stays(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.fails_within = True
    talking = conversation(scripted)
    await in_thread(talking, "one")
    output = capsys.readouterr()
    assert ANSWER in output.out
    assert "error: lost a node" in output.err
    assert talking.messages[-1] == {"role": "assistant", "content": ANSWER}


async def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.may_send = lambda number, chunk: chunk < 2 or is_stopped.is_set()
    is_stopped = asyncio.Event()
    talking = conversation(scripted)
    talking.begin()
    answering = asyncio.create_task(talking.answer("one"))  # a Ctrl-C cancels this task
    async with asyncio.timeout(60):
        while WORDS[0] not in capsys.readouterr().out:
            await asyncio.sleep(0.01)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    is_stopped.set()
    assert talking.messages[-1] == {"role": "assistant", "content": WORDS[0]}


def test_ctrl_c_goes_on_with_the_next_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted(self: Conversation, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", interrupted)
    assert talk(Conversation(url="http://127.0.0.1:9", model="m"), ["one", "two"]) == 0
    assert capsys.readouterr().out.count("[stopped]") == 2


async def test_lines_from_a_pipe(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    argv = ["--url", scripted.url.removeprefix("http://") + "/v1/", "--temperature", "0", "--max-tokens", "9"]
    assert await asyncio.wait_for(asyncio.to_thread(main, argv), 60) == 0
    (body,) = scripted.bodies
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("scripted", 0.0, 9)
    assert ANSWER in capsys.readouterr().out


async def test_a_server_that_wants_a_key(scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.wants_key = True
    assert await asyncio.wait_for(asyncio.to_thread(main, ["--url", scripted.url]), 60) == 1
    assert "--api-key" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "kvasir serve" in capsys.readouterr().err


def test_describe() -> None:
    assert describe(Timeline(sent_s=0.0, arrivals_s=(0.045, 1.045), num_output_tokens=21)) == (
        "TTFT 45 ms, 20.0 tokens/s (21 tokens)"
    )
    assert describe(Timeline(sent_s=0.0, arrivals_s=(0.045,), num_output_tokens=1)) == "TTFT 45 ms (1 token)"
