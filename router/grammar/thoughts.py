"""A grammar for an answer that has thoughts in front of it: they are free, what comes after them is not."""

import re

from kvasir.common.grammar import Grammar
from kvasir.router.text.reasoning import CLOSE, OPEN, Start

_ENDS = {"/": "\\/", "\n": "\\n", "\r": "\\r"}  # what ends a pattern in Lark
_THOUGHTS = f"""
thoughts[suffix="{CLOSE}"]: /(?s:.*)/
NEWLINES: /\\n*/
"""


def behind_thoughts(grammar: Grammar, start: Start | None) -> Grammar:
    """The grammar for the whole output; `start` says where in it the model begins.

    A grammar that a client wrote itself, in Lark, is for the whole output, thoughts and all: it has names of its own.
    """
    if start in (None, Start.ANSWERING) or grammar.kind == "lark":
        return grammar
    if grammar.kind == "json_schema":
        answer, behind = f"answer: %json {grammar.source}", "NEWLINES answer"
    else:  # one lexeme with the line breaks in front of it, for it may begin with some itself
        answer = f"answer: ANSWER\nANSWER: /{_without_ends(grammar.source) or '(?:)'}/\nBEHIND: NEWLINES ANSWER"
        behind = "BEHIND"
    beginning = f"thoughts {behind}"
    if start is Start.EITHER:
        beginning = f'answer | "{OPEN}" {beginning}'
    return Grammar("lark", f"start: {beginning}\n{_THOUGHTS}{answer}\n")


def _without_ends(pattern: str) -> str:
    r"""As it may stand between slashes: a/b -> a\/b, a\/b -> a\/b, a\\/b -> a\\\/b"""
    characters = re.finditer(r"\\?(?s:.)", pattern)  # escaped ones with what escapes them
    return "".join(_ENDS.get(one[0].removeprefix("\\"), one[0]) for one in characters)
