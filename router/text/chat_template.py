"""A conversation to one text, by the model's own Jinja template, in a sandbox."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvasir.common.errors import InvalidRequest
from kvasir.router.text.tokenizer import read_tokenizer_config

Message = dict[str, Any]
_CUT_HERE = "\ue000kvasir-cut-here\ue001"


class Arguments(dict[str, Any]):
    """A call's arguments. Some templates want a mapping, some a text of JSON; to the latter it looks like one."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, text: Any) -> Any:
        return str(self) + text

    def __radd__(self, text: Any) -> Any:
        return text + str(self)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _environment().from_string(source)
        self.special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequest where the template refuses the conversation."""
        messages = [*messages]
        if continue_final_message:
            final = messages[-1]
            messages[-1] = {**final, "content": (final.get("content") or "") + _CUT_HERE}
        variables = {"documents": None, **self.special_tokens, **(template_kwargs or {})}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": [*tools] or None}
        try:
            text = self._template.render(variables)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        if not continue_final_message:
            return text
        begin, found, _ = text.rpartition(_CUT_HERE)
        if not found:
            raise InvalidRequest("the chat template does not show the final message", "continue_final_message")
        return begin


def find_template(model_dir: Path) -> str | None:
    """The model's template: a file of its own, or part of tokenizer_config.json; None if it has none."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_tokenizer_config(model_dir).get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, since that is what templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's part for training; for serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own: a prompt is not HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
