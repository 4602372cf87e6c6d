"""Sources of grammars to matchers, by llguidance. Routers do it to say no in time, nodes to generate by it.

The limits are part of the language: what a router lets pass must compile on a node, so both use these.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar

_MAX_MESSAGE_CHARS = 600
_PICTURE = re.compile(r"<(?:state|backtrace|non-verbose)")
_NO_TEXT = "there is no text that the grammar allows"
# A matcher's lexer takes up to some 300 bytes a state, and lives as long as a cache keeps it.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


class GrammarError(InvalidRequest):
    """The grammar means nothing, allows nothing, or is too large; the message names the part at fault."""


def load_tokenizer(path: Path, vocab_size: int | None = None, end_token_ids: Collection[int] = ()) -> LLTokenizer:
    """Of a tokenizer.json. Takes about a quarter of a second for 50,000 tokens. Raises GrammarError."""
    known = sorted(end_token_ids)
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=known or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise GrammarError(f"this model's tokenizer cannot be held to a grammar: {error}") from None


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at its beginning, for which there is a token to begin with. Raises GrammarError.

    Takes a millisecond for most, and lets go of the GIL; some hundred milliseconds at the limits.
    """
    try:
        source = _SOURCES[grammar.kind](grammar.source)
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits are met only here
    check(matcher)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError(_NO_TEXT)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError where the matcher has failed, which it never does by itself."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))


def _reason(message: str) -> str:
    """Without llguidance's picture of its own state, and with both ends of what is long."""
    words = " ".join(_PICTURE.split(message, maxsplit=1)[0].split())
    if words.startswith("NoExtension"):
        return _NO_TEXT
    if words.startswith("panic"):
        return "the grammar is larger than its compiler can take"
    half = _MAX_MESSAGE_CHARS // 2
    return words if len(words) <= _MAX_MESSAGE_CHARS else f"{words[:half]} ... {words[-half:]}"
