"""Real worker processes, given what no compiler should be given."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.grammar.sources import choice_grammar, json_object_grammar, json_schema_grammar
from tests.tokenizers import save_byte_level

TIMEOUT_S = 5.0  # good ones take milliseconds
# Compiling it takes time that grows with the square of the properties: far more than anybody waits.
SLOW = json_schema_grammar(
    {"properties": {f"p{i:05}": {"type": "string", "pattern": f"^[a-z]{{{i % 50}}}[0-9]+x{i}$"} for i in range(11_000)}}
)


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    return save_byte_level(tmp_path)


@pytest.fixture
async def checker(tokenizer_path: Path) -> AsyncIterator[GrammarChecker]:
    """Patient: how busy this machine is refuses no grammar."""
    checker = GrammarChecker(tokenizer_path, num_workers=1, timeout_s=60)
    yield checker
    await checker.close()


@pytest.fixture
async def hasty_checker(tokenizer_path: Path) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer_path, num_workers=1, timeout_s=TIMEOUT_S)
    yield checker
    await checker.close()


async def reason(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await checker.check(grammar, "response_format")
    assert raised.value.param == "response_format"
    return str(raised.value)


async def test_good_grammars_pass_as_they_are(checker: GrammarChecker) -> None:
    for grammar in (
        json_object_grammar(),
        json_schema_grammar({}),
        json_schema_grammar({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#"}}}}}),
        choice_grammar(["a", "日本", "\n#~-"]),
        Grammar("lark", 'start: "a" B\nB: /[0-9]+/'),
    ):
        assert await checker.check(grammar, "response_format") == grammar


async def test_a_grammar_is_not_refused_for_a_stall_of_our_own(tokenizer_path: Path) -> None:
    """Its compiler had been done in time, while nobody was there to take the answer."""
    checker = GrammarChecker(tokenizer_path, num_workers=1, timeout_s=1.0)
    await checker.check(json_object_grammar(), "response_format")  # the process is up
    checking = asyncio.create_task(checker.check(json_schema_grammar({}), "response_format"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(1.3)  # noqa: ASYNC251  (on purpose)
    await checking
    await checker.close()


async def test_gbnf_is_translated(checker: GrammarChecker) -> None:
    checked = await checker.check(Grammar("lark", 'root ::= "a" num\nnum ::= [0-9]+'), "structured_outputs.grammar")
    assert checked.kind == "lark"
    assert checked.source.split() == ["%llguidance", "{}", "start:", '"a"', "NUM", "NUM:", "/[0-9]/+"]


BAD: list[tuple[Any, str]] = [
    ({"properties": {"a": {"type": "string", "pattern": "^(["}}, "required": ["a"]}, r"\^\(\[.*#/properties/a"),
    ({"$ref": "#/$defs/missing"}, r"/\$defs/missing"),
    ({"$ref": "https://example.com/schema"}, r"https://example.com/schema"),
    ({"type": "thing"}, r"thing"),
    ({"properties": {"a": {"items": {"type": 7}}}}, r"type must be.*#/properties/a/items"),
    ({"properties": {"foo": "bar"}}, r"#/properties/foo"),
    ({"type": "array", "items": [1]}, r"#/items/0"),
    ({"anyOf": []}, r"anyOf is empty"),
    ({"enum": []}, r"(?i)unsatisfiable"),
    ({"$ref": "#"}, r"no text"),
    ({"type": "array", "uniqueItems": True}, r"uniqueItems"),
    ({"type": "string", "pattern": "(?=a)b"}, r"look-around"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, r"minimum \(5\)"),
]


async def test_bad_schemas_are_refused_by_the_name_of_the_part_at_fault(checker: GrammarChecker) -> None:
    for schema, pattern in BAD:
        message = await reason(checker, json_schema_grammar(schema))
        assert "response_format" in message
        assert re.search(pattern, message), message


async def test_what_takes_too_long_is_refused_and_the_next_is_served(hasty_checker: GrammarChecker) -> None:
    checker = hasty_checker
    await checker.check(json_object_grammar(), "response_format")
    async with asyncio.timeout(60):
        assert "takes more than the 5 s" in await reason(checker, SLOW)
    await checker.check(choice_grammar(["after it"]), "response_format")
    # It is known now, and costs nobody a second process.
    [pid] = worker_pids()
    assert "takes more than" in await reason(checker, SLOW)
    assert worker_pids() == [pid]


async def test_other_work_goes_on_meanwhile(checker: GrammarChecker) -> None:
    await checker.check(json_object_grammar(), "response_format")
    asking = asyncio.create_task(checker.check(SLOW, "response_format"))
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert not asking.done()


async def test_a_worker_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(json_object_grammar(), "response_format")
    for number in (signal.SIGKILL, signal.SIGTERM):
        [pid] = worker_pids()
        os.kill(pid, number)
        assert await checker.check(choice_grammar([str(number)]), "response_format")
        assert worker_pids() != [pid]


async def test_a_client_that_leaves_takes_the_answer_from_nobody(checker: GrammarChecker) -> None:
    first = asyncio.create_task(checker.check(json_object_grammar(), "a"))
    second = asyncio.create_task(checker.check(json_object_grammar(), "b"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == json_object_grammar()


async def test_too_large_and_too_many(tokenizer_path: Path) -> None:
    checker = GrammarChecker(tokenizer_path, num_workers=1, timeout_s=60, max_source_bytes=100, max_waiting=2)
    try:
        with pytest.raises(InvalidRequest, match="may have at most 100"):
            await checker.check(choice_grammar(["é" * 50]), "structured_outputs.choice")
        waiting = [asyncio.create_task(checker.check(choice_grammar([str(i)]), "p")) for i in range(3)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Grammar, Grammar, Overloaded]
    finally:
        await checker.close()


async def test_a_tokenizer_that_cannot_be_read_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"no": "tokenizer"}))
    checker = GrammarChecker(path, num_workers=1, timeout_s=60)
    try:
        for _ in range(2):
            assert "cannot be held to a grammar" in await reason(checker, json_object_grammar())
    finally:
        await checker.close()


async def test_close_leaves_no_process(tokenizer_path: Path) -> None:
    checker = GrammarChecker(tokenizer_path, num_workers=2, timeout_s=60)
    await asyncio.gather(*(checker.check(choice_grammar([str(i)]), "p") for i in range(4)))
    asking = asyncio.create_task(checker.check(SLOW, "p"))
    await asyncio.sleep(0.2)
    await checker.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert worker_pids() == []


def worker_pids() -> list[int]:
    """Children of this process that compile grammars."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except (OSError, NotADirectoryError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and b"kvasir.router.grammar.worker" in command:
            pids.append(int(entry.name))
    return pids
