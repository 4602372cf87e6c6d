"""The tools a client offers: what the template shows of them, and what an answer may then be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.schemas import moved
from kvasir.router.grammar.sources import json_schema_grammar
from kvasir.router.openai.models import AllowedTools, ChatBody, FunctionBody, NamedTool, ToolBody
from kvasir.router.text.tools.format import ToolFormat
from kvasir.router.text.tools.formats import TOOL_FORMATS, ListOfCalls, OneCall


@dataclass(frozen=True, slots=True)
class ToolPlan:
    shown: tuple[dict[str, Any], ...] = ()  # to the template
    new_format: Callable[[], ToolFormat] | None = None  # of one choice's answer; None: it calls nothing
    grammar: Grammar | None = None  # what the answer must be, where a call is wanted
    one_call: bool = False
    schemas: tuple[tuple[str, Grammar], ...] = ()  # that the grammar is made of: each by the field it comes from


def tool_plan(body: ChatBody, format_name: str | None) -> ToolPlan:
    """`format_name`: how this model writes calls on its own account, if that is known.

    A call that is asked for by name, or by `required`, is written as plain JSON, which a grammar sees to; so it can
    be had from any model. With `none` the tools are not even shown.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    tools = list(body.tools or ())
    if isinstance(choice, AllowedTools):
        tools = _chosen(tools, [entry.function.name for entry in choice.allowed_tools.tools])
        choice = choice.allowed_tools.mode
    if isinstance(choice, NamedTool):
        [tool] = _chosen(tools, [choice.function.name])
        schemas = _schemas(body.tools or (), [tool])
        return ToolPlan(shown_tools(tools), partial(OneCall, [tool.function.name]), schemas[0][1], True, schemas)
    if choice == "none":
        return ToolPlan()
    if not tools:
        raise InvalidRequest(f"'tool_choice' is {choice!r}, but there are no 'tools'", "tool_choice", "invalid_value")
    names = [tool.function.name for tool in tools]
    one_call = body.parallel_tool_calls is False
    if choice == "required":
        schemas = _schemas(body.tools or (), tools)
        grammar = json_schema_grammar(_schema_of_calls(tools, one_call))
        return ToolPlan(shown_tools(tools), partial(ListOfCalls, names), grammar, one_call, schemas)
    if format_name is None:
        message = "this router cannot tell calls of tools from text: it wants --tool-call-parser for its model, and"
        message += " --enable-auto-tool-choice; a 'tool_choice' of 'required' or a function can be had"
        raise InvalidRequest(message, "tool_choice", "unsupported_parameter")
    return ToolPlan(shown_tools(tools), partial(TOOL_FORMATS[format_name], names), None, one_call)


def _chosen(tools: Sequence[ToolBody], names: Sequence[str]) -> list[ToolBody]:
    by_name = {tool.function.name: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(
                f"'tool_choice' names {name!r:.80}, which is not in 'tools'", "tool_choice", "invalid_value"
            )
    return [by_name[name] for name in names]


def shown_tools(tools: Sequence[ToolBody]) -> tuple[dict[str, Any], ...]:
    return tuple({"type": "function", "function": _shown_function(tool.function)} for tool in tools)


def _shown_function(function: FunctionBody) -> dict[str, Any]:
    members = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {key: value for key, value in members.items() if value is not None}


def _schemas(given: Sequence[ToolBody], chosen: Sequence[ToolBody]) -> tuple[tuple[str, Grammar], ...]:
    schemas = []
    identities = {id(tool) for tool in chosen}
    for number, tool in enumerate(given):
        if id(tool) in identities:
            param = f"tools[{number}].function.parameters"
            if (kind := (tool.function.parameters or {}).get("type", "object")) != "object":
                raise InvalidRequest(f"'{param}.type' must be object, got {kind!r:.80}", param, "invalid_value")
            try:
                schemas.append((param, json_schema_grammar(_schema(tool))))
            except InvalidRequest as error:
                raise InvalidRequest(f"invalid '{param}': {error}", param, "invalid_value") from None
    return tuple(schemas)


def _schema(tool: ToolBody) -> dict[str, Any]:
    """A function without parameters takes an empty object."""
    parameters = tool.function.parameters
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _schema_of_calls(tools: Sequence[ToolBody], one_call: bool) -> dict[str, Any]:
    try:
        parameters = [
            moved(_schema(tool), f"#/items/anyOf/{number}/properties/parameters") for number, tool in enumerate(tools)
        ]
    except RecursionError:
        raise InvalidRequest("the schema of a tool is nested too deeply", "tools", "invalid_value") from None
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, parameters, strict=True)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    return schema | {"maxItems": 1} if one_call else schema
