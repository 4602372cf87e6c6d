"""Ends a text at the first stop string, however the text is cut into pieces."""

from collections.abc import Sequence

from kvasir.router.text.parts import overlap


class StopStrings:
    """Passes text on, but keeps back what may yet become a stop string.

    The first match is the one that is complete first (of two that end together, the longer): only that does not depend
    on where the pieces are cut. A piece may be hidden: it takes part in matches but is not passed on.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""
        self._shown: list[bool] = []  # one a held character
        self.matched: str | None = None

    def push(self, text: str, shown: bool = True) -> str:
        """What can be passed on now. After a match, nothing more is to be pushed."""
        if not self._stops:
            return text if shown else ""
        self._held += text
        self._shown += [shown] * len(text)
        match = self._first_match()
        if match is None:
            return self._take(len(self._held) - self._num_undecided())
        start, self.matched = match
        return self._take(start) + (self.matched if self._include_in_output else "")

    def flush(self) -> str:
        """The text has ended: what was kept back became no stop string."""
        return self._take(len(self._held)) if self.matched is None else ""

    def _first_match(self) -> tuple[int, str] | None:
        starts = [(self._held.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_undecided(self) -> int:
        """stops ['<end>'], held 'a <e' -> 2"""
        return max((overlap(self._held, stop) for stop in self._stops), default=0)

    def _take(self, num_chars: int) -> str:
        text, shown = self._held[:num_chars], self._shown[:num_chars]
        self._held, self._shown = self._held[num_chars:], self._shown[num_chars:]
        return text if all(shown) else "".join(char for char, is_shown in zip(text, shown, strict=True) if is_shown)
