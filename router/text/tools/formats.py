"""How models write calls of tools, format by format."""

import re
from collections.abc import Collection

from kvasir.router.text.parts import overlap
from kvasir.router.text.tools.format import ToolFormat

_MAX_HEAD_CHARS = 512  # of a call's name and id
_NAME = re.compile(r"[\w.\-]+")


class Hermes(ToolFormat):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, as often as there are calls: Hermes, Qwen."""

    markers = ("<tool_call>", "</tool_call>")

    def _first(self) -> bool:
        return self._find("<tool_call>") and self._begin_object(self._space + "<tool_call>")

    def _after_call(self) -> bool:
        self._step = self._skip_to_marker
        return True

    def _skip_to_marker(self) -> bool:
        """A brace too many, or the like, is nobody's."""
        found = [(self._held.index(marker), marker) for marker in self.markers if marker in self._held]
        if not found:
            self._held = self._held[len(self._held) - max(overlap(self._held, marker) for marker in self.markers) :]
            return False
        start, marker = min(found)
        self._held = self._held[start + len(marker) :]
        self._step = self._first
        return self._begin_object(marker) if marker == "<tool_call>" else True

    def _show_rest(self, is_cut: bool) -> None:
        if self._step != self._skip_to_marker:
            super()._show_rest(is_cut)


class Llama3Json(ToolFormat):
    """The answer is `{"name": "f", "parameters": {...}}`, or several with `;` between them: Llama 3.1 and later.

    An answer that begins with anything else is content, up to a `<|python_tag|>`.
    """

    markers = ("<|python_tag|>",)

    def _first(self) -> bool:
        text = self._held.lstrip(" \t\r\n;" if self._follows_call else None)
        if text.startswith("{"):
            space = "" if self._follows_call else self._held[: len(self._held) - len(text)]
            self._held = text
            return self._begin_object(space, self._names)
        if text and overlap(text, self.markers[0]) < len(text):
            self._step = self._content
            return True
        return False

    def _content(self) -> bool:
        return self._find(self.markers[0]) and self._begin_object()

    def _after_no_call(self) -> bool:
        self._step = self._content
        return True

    def _show_rest(self, is_cut: bool) -> None:
        if not (self._follows_call and self._held.strip(" \t\r\n;") == ""):
            super()._show_rest(is_cut)


class Mistral(ToolFormat):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]f[ARGS]{...}`, once a call."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_call_id(self) -> str:
        """The only kind that Mistral's templates take."""
        return self._next_digest()[:9]

    def _first(self) -> bool:
        if not self._find("[TOOL_CALLS]"):
            return False
        self._step = self._opened
        return True

    def _opened(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith("["):
            self._held = self._held[1:]
            self._step = self._in_list
        elif self._held.startswith("{"):
            self._begin_object()
        elif self._held:
            self._step = self._in_head
        return bool(self._held)

    def _after_call(self) -> bool:
        self._step = self._in_list
        return True

    def _in_head(self) -> bool:
        """f[ARGS]{...  or  f[CALL_ID]0123[ARGS]{...  or  f{..."""
        head, found, _ = self._held[: _MAX_HEAD_CHARS + 1].partition("{")
        if not found and len(head) <= _MAX_HEAD_CHARS:
            return False
        name = head.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
        if not found or not _NAME.fullmatch(name):
            self._step = self._first
            return True
        self._held = self._held[len(head) :]
        return self._begin_arguments(name)

    def _show_rest(self, is_cut: bool) -> None:
        if self._step == self._first or (self._step == self._in_head and not is_cut):
            super()._show_rest(is_cut)


class ListOfCalls(ToolFormat):
    """What a grammar makes of any model's answer: `[{"name": "f", "parameters": {...}}, ...]` and nothing else."""

    def _first(self) -> bool:
        text = self._held.lstrip()
        if text.startswith("["):
            self._held = text[1:]
            self._step = self._in_list
        return bool(text) and self._step == self._in_list

    def _after_call(self) -> bool:
        self._step = self._in_list
        return True

    def _show_rest(self, is_cut: bool) -> None:
        pass


class OneCall(ToolFormat):
    """The answer is the arguments of the one tool that it may call: a grammar sees to that."""

    finish_reason = "stop"  # as OpenAI and vLLM have it where the client itself has named the function

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        [self._name] = self._names

    def _first(self) -> bool:
        self._held = "" if self._num_calls else self._held.lstrip()  # nothing follows it
        return bool(self._held) and self._begin_arguments(self._name)


TOOL_FORMATS: dict[str, type[ToolFormat]] = {"hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral}


def detect_format(template: str) -> str | None:
    """By what the chat template writes itself."""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return "llama3_json"
    return None
