"""`python -m kvasir.router.grammar.worker TOKENIZER_JSON SECONDS`: compiles grammars that may take this process down.

    stdin   a frame for each grammar: {"kind", "source"}
    stdout  a frame when ready, then one for each grammar: {} | {"source": what it was translated to} | {"error": why}

A frame holds JSON. The process ends by itself if a grammar takes it so many seconds, which is longer than anybody
waits.
"""

import json
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir.common.grammar import Grammar
from kvasir.common.grammar_compiler import GrammarError, compile_grammar, load_tokenizer
from kvasir.router.framed_process import read_frame, write_frame
from kvasir.router.grammar.locate import where_it_fails

_MAX_MEMORY_BYTES = 4 << 30  # of addresses: what is really used is far less
_GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")

Frame = dict[str, Any]


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the router, which then ends our stdin
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    tokenizer = None
    problem: Frame = {}
    try:
        tokenizer = load_tokenizer(Path(argv[0]))
    except GrammarError as error:
        problem = {"error": str(error)}
    _say(problem)
    while (asked := read_frame(sys.stdin.buffer)) is not None:
        signal.alarm(int(argv[1]))
        _say(problem if tokenizer is None else answer(tokenizer, json.loads(asked)))
        signal.alarm(0)


def _say(frame: Frame) -> None:
    write_frame(sys.stdout.buffer, json.dumps(frame).encode())


def answer(tokenizer: LLTokenizer, asked: Frame) -> Frame:
    grammar = Grammar(asked["kind"], asked["source"])
    try:
        if grammar.kind == "lark" and _GBNF_RULE.search(grammar.source):
            grammar = Grammar("lark", _translated(grammar.source))
        compile_grammar(tokenizer, grammar)
    except GrammarError as error:
        place = where_it_fails(tokenizer, grammar, str(error))
        return {"error": f"{error} (at {place})" if place else str(error)}
    return {"source": grammar.source} if grammar.source != asked["source"] else {}


def _translated(gbnf: str) -> str:
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # its own errors have no class in common
        raise GrammarError(f"not a grammar in GBNF: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
