"""What a model thinks, apart from what it says: `<think>...</think>` in front of the answer."""

from enum import Enum

from kvasir.router.text.parts import Part, Reasoning, overlap

OPEN, CLOSE = "<think>", "</think>"


class Start(Enum):
    """Where an answer begins, seen from its prompt."""

    THINKING = "thinking"  # the prompt has opened the thoughts, or the model always thinks first
    EITHER = "either"  # the answer opens them, or has none
    ANSWERING = "answering"  # the prompt has closed them


def start_of_answer(prompt: str, *, thinks_first: bool, begun: str = "") -> Start:
    """`prompt` as the template wrote it; `begun`: the answer that it ends with, where one is to be continued."""
    if begun:
        return Start.THINKING if begun.rfind(OPEN) > begun.rfind(CLOSE) else Start.ANSWERING
    tail = prompt.rstrip()
    if tail.endswith(OPEN):
        return Start.THINKING
    if tail.endswith(CLOSE):
        return Start.ANSWERING
    return Start.THINKING if thinks_first else Start.EITHER


class ReasoningReader:
    """Takes text in pieces. The parts depend on the text alone, never on where its pieces are cut.

    Newlines beside a marker are part of it, as templates write them.
    """

    def __init__(self, start: Start) -> None:
        self.has_begun = start is Start.THINKING  # there are thoughts
        self.is_over = start is Start.ANSWERING  # what comes is the answer's
        self._may_open = True
        self._held = ""
        self._skips_newlines = False

    def push(self, text: str) -> tuple[list[Part], str]:
        """The thoughts, and what of the text is the answer's."""
        if self.is_over:
            return [], self._answer(text)
        self._held += text
        if self._may_open and not self._has_opened():
            return [], self._answer(self._take_held()) if self.is_over else ""
        return self._thoughts()

    def flush(self, *, is_cut: bool) -> tuple[list[Part], str]:
        """The text has ended; `is_cut`: by the limit of tokens. Half of a marker is then no thought."""
        if self.is_over:
            return [], ""
        held = self._take_held()
        if not self.has_begun:
            return [], "" if is_cut and held.strip() else held
        half = overlap(held, CLOSE) if is_cut else 0
        return _reasoning(held[: len(held) - half]), ""

    def _has_opened(self) -> bool:
        """False: not yet, or never, and then it is over."""
        text = self._held.lstrip()
        if OPEN.startswith(text) and text != OPEN:
            return False  # an incomplete marker, or nothing at all
        self._may_open = False
        if text.startswith(OPEN):
            self.has_begun = True
            self._held = text.removeprefix(OPEN)
        elif not self.has_begun:
            self.is_over = True
        self._skips_newlines = self.has_begun
        return self.has_begun

    def _thoughts(self) -> tuple[list[Part], str]:
        if self._skips_newlines:
            self._held = self._held.lstrip("\n")
            self._skips_newlines = not self._held
        thought, found, answer = self._held.partition(CLOSE)
        if found:
            self.is_over = self._skips_newlines = True
            self._held = ""
            return _reasoning(thought.rstrip("\n")), self._answer(answer)
        end = len(thought) - overlap(thought, CLOSE)
        end = len(thought[:end].rstrip("\n"))
        self._held = thought[end:]
        return _reasoning(thought[:end]), ""

    def _answer(self, text: str) -> str:
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return text

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


def _reasoning(text: str) -> list[Part]:
    return [Reasoning(text)] if text else []


REASONING_FORMATS = {"deepseek_r1": True, "qwen3": False}  # whether the model thinks first though no prompt says so
