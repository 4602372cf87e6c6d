"""A grammar for an answer that has thoughts in front of it: they are free, what comes after them is not."""

from kvasir.common.grammar import Grammar
from kvasir.router.text.reasoning import CLOSE, OPEN, Start

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
        answer = f"%json {grammar.source}"
    else:
        answer = "/" + grammar.source.replace("\\/", "/").replace("/", "\\/") + "/"
    beginning = "thoughts NEWLINES answer"
    if start is Start.EITHER:
        beginning = f'answer | "{OPEN}" {beginning}'
    return Grammar("lark", f"start: {beginning}\n{_THOUGHTS}answer: {answer}\n")
