"""JSON schemas of fields that may be one of several things: what they are is looked at where they are used."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

_NULL = {"type": "null"}
_TEXT = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT = {"type": "object"}


def _list_of(schema: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, **bounds}


def _text_parts(*kinds: str) -> dict[str, Any]:
    part = {"type": "object", "properties": {"type": {"enum": [*kinds]}, "text": _TEXT}, "required": ["type"]}
    return _list_of(part)


def _one_of(*schemas: dict[str, Any], **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, _NULL], **more})


Nothing = Annotated[Any, WithJsonSchema(_NULL)]  # what cannot be had, and is refused with a reason
StopStrings = Annotated[Any, _one_of(_TEXT, _list_of(_TEXT, maxItems=64))]
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKEN_IDS, _list_of(_TEXT), _list_of(_TOKEN_IDS)]})]
Content = Annotated[Any, _one_of(_TEXT, _text_parts("text", "input_text", "output_text", "refusal"))]
ResponseFormat = Annotated[
    Any,
    _one_of(
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _OBJECT},
            "required": ["type"],
        }
    ),
]
StructuredOutputs = Annotated[
    Any,
    _one_of(
        {
            "type": "object",
            "description": "Exactly one of json, regex, choice, grammar and json_object.",
            "properties": {
                "json": {"anyOf": [_OBJECT, _TEXT]},
                "regex": _TEXT,
                "choice": _list_of(_TEXT),
                "grammar": _TEXT,
                "json_object": {"type": "boolean"},
            },
        }
    ),
]
ResponseInput = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _list_of(
                    {
                        "type": "object",
                        "properties": {
                            "type": {
                                "enum": [
                                    "message",
                                    "reasoning",
                                    "function_call",
                                    "function_call_output",
                                    "item_reference",
                                ]
                            },
                            "role": {"enum": ["user", "assistant", "system", "developer"]},
                        },
                    },
                    minItems=1,
                ),
            ]
        }
    ),
]
