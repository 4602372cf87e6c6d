"""One sequence's token ids to the text that its client sees."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.router.text.detokenizer import Detokenizer
from kvasir.router.text.stop_strings import StopStrings
from kvasir.router.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_markers: frozenset[str] = frozenset()  # special tokens that are shown all the same
    min_tokens: int = 0  # so many tokens pass before a stop string counts
    stop_token_ids: frozenset[int] = frozenset()  # those that the client has named


class TextStream:
    """Text by token. The text does not depend on how many tokens come at once."""

    __slots__ = (
        "_detokenizer",
        "_has_stops",
        "_hidden_ids",
        "_matches_hidden",
        "_rules",
        "_shown_ids",
        "_stop_strings",
        "_tokenizer",
        "is_stopped",
        "num_tokens",
    )

    def __init__(self, tokenizer: TextTokenizer, rules: TextRules, end_token_ids: frozenset[int] = frozenset()) -> None:
        """`end_token_ids`: each of them ends the sequence, and is not text."""
        self._tokenizer = tokenizer
        self._rules = rules
        self._shown_ids = tokenizer.special_ids(rules.shown_markers)
        hidden = tokenizer.all_special_ids - self._shown_ids if rules.skip_special_tokens else frozenset()
        self._hidden_ids = hidden if rules.include_stop_str_in_output else hidden | end_token_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._has_stops = bool(rules.stop)
        self._stop_strings = StopStrings(rules.stop, rules.include_stop_str_in_output)
        # A stop string may name a special token, which is matched even where it is not shown.
        self._matches_hidden = any(
            special in stop for stop in rules.stop for special in tokenizer.special_texts.values()
        )
        self.num_tokens = 0
        self.is_stopped = False  # a stop string has ended it; what comes after is not its text any more

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes ids up to the one that completes a stop string."""
        if not self._has_stops and self._hidden_ids.isdisjoint(token_ids):
            self.num_tokens += len(token_ids)
            return self._detokenizer.push_all(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            pieces.append(self._text_of(token_id))
            if self.is_stopped:
                break
        return "".join(pieces)

    def flush(self) -> str:
        """What was kept back: an incomplete character, the beginning of a stop string."""
        if self.is_stopped:
            return ""
        tail = self._match(self._detokenizer.flush())
        return tail + self._stop_strings.flush()

    def stop_reason(self, token_ids: Sequence[int]) -> str | int | None:
        """Which of the client's own stops has ended it, at the last of `token_ids`; None: something else."""
        if self.is_stopped:
            return self._stop_strings.matched
        return token_ids[-1] if token_ids and token_ids[-1] in self._rules.stop_token_ids else None

    def _text_of(self, token_id: int) -> str:
        if token_id not in self._hidden_ids:
            return self._match(self._detokenizer.push(token_id))
        if self._matches_hidden:
            return self._match(self._tokenizer.decode([token_id]), shown=False)
        return ""

    def _match(self, text: str, shown: bool = True) -> str:
        if self.num_tokens <= self._rules.min_tokens:
            return text if shown else ""
        passed = self._stop_strings.push(text, shown)
        self.is_stopped = self._stop_strings.matched is not None
        return passed
