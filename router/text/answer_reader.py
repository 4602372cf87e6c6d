"""A choice's text to thoughts, content and calls."""

from kvasir.router.text.parts import CallEnd, Content, Part
from kvasir.router.text.reasoning import ReasoningReader
from kvasir.router.text.tools.format import ToolFormat


class AnswerReader:
    """Without a reader for thoughts, or one for calls, all is content."""

    def __init__(
        self, reasoning: ReasoningReader | None = None, tools: ToolFormat | None = None, *, one_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._num_complete_calls = 0
        self.num_reasoning_tokens = 0
        self._num_undecided_tokens = 0  # they may yet be the beginning of thoughts

    @property
    def finish_reason(self) -> str:
        """Of an answer that has come to its own end."""
        return "stop" if self._tools is None or not self._num_complete_calls else self._tools.finish_reason

    @property
    def is_done(self) -> bool:
        """The only call that it may make is complete: what comes after is not the answer's any more."""
        return self._one_call and self._num_complete_calls > 0

    def push_token(self, text: str) -> list[Part]:
        """The text of one more token."""
        if self._reasoning is not None and not self._reasoning.is_over:
            self._num_undecided_tokens += 1
        return self.push(text)

    def push(self, text: str) -> list[Part]:
        if self.is_done:
            return []
        thoughts: list[Part] = []
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
            if self._reasoning.has_begun:
                self.num_reasoning_tokens += self._num_undecided_tokens
                self._num_undecided_tokens = 0
        return thoughts + self._read(text)

    def flush(self, *, is_cut: bool) -> list[Part]:
        """The text has ended; `is_cut`: by the limit of tokens."""
        if self.is_done:
            return []
        thoughts: list[Part] = []
        text = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.flush(is_cut=is_cut)
        parts = self._read(text)
        if self._tools is not None:
            parts += self._seen(self._tools.flush(is_cut=is_cut))
        return thoughts + parts

    def _read(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._seen(self._tools.push(text))

    def _seen(self, parts: list[Part]) -> list[Part]:
        for number, part in enumerate(parts):
            if isinstance(part, CallEnd):
                self._num_complete_calls += 1
                if self._one_call:
                    return parts[: number + 1]
        return parts
