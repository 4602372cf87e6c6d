"""The OpenAPI document, made of the models that parse what clients send, and those that tests hold the answers to."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from kvasir import __version__
from kvasir.router.docs.operations import OPERATIONS, Operation
from kvasir.router.docs.replies import Error

_REF = "#/components/schemas/{model}"
_REFUSALS = {
    400: "The request is at fault; `param` names the field.",
    401: "No valid API key.",
    404: "There is no such model, response or route.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "A limit of this key is reached; see Retry-After.",
    499: "The client has left.",
    500: "A fault of the server's own.",
    503: "Full, draining, or no node is there; see Retry-After.",
    504: "The deadline has passed.",
}


def openapi_document(model_names: Sequence[str] = ()) -> dict[str, Any]:
    """`model_names`: the only ones that there are; none: they are not told."""
    schemas: dict[str, Any] = {}

    def ref(model: Any, mode: Any) -> dict[str, Any]:
        """The model's schema, whose parts are put among the document's."""
        schema = TypeAdapter(model).json_schema(ref_template=_REF, mode=mode)
        schemas.update(schema.pop("$defs", {}))
        if not isinstance(model, type):
            return schema
        schemas[model.__name__] = schema
        return {"$ref": _REF.format(model=model.__name__)}

    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, ref)
    _name_models(model_names, [schemas[body.__name__] for operation in OPERATIONS for body in operation.bodies])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": __version__,
            "description": "OpenAI's API, with vLLM's further parameters. Fields that are not known are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": _without_null_defaults(schemas),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],  # a key, where the operator wants one
    }


Ref = Callable[[Any, Any], dict[str, Any]]


def _described(operation: Operation, ref: Ref) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path}".translate(str.maketrans("/{}.", "____")),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _answers(operation, ref),
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.bodies:
        options = [ref(body, "validation") for body in operation.bodies]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if 401 not in operation.errors:
        described["security"] = []
    return described


def _answers(operation: Operation, ref: Ref) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    if not operation.is_always_refused:
        content: dict[str, Any] = {operation.media_type: {"schema": {"type": "string"}}}
        if operation.reply is not None:
            content = {"application/json": {"schema": ref(operation.reply, "serialization")}}
        if operation.chunk is not None:
            chunk = ref(operation.chunk, "serialization")
            content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": chunk}
        answers["200"] = {"description": "Done.", "content": content}
    models = dict.fromkeys(operation.errors, Error) | operation.also
    for status, model in models.items():
        content = {"application/json": {"schema": ref(model, "serialization")}}
        answers[str(status)] = {"description": _REFUSALS[status], "content": content}
    return answers


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    return [
        *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in in_path),
        *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()),
    ]


def _name_models(names: Sequence[str], bodies: Sequence[dict[str, Any]]) -> None:
    for body in bodies:
        model = body["properties"]["model"]
        for schema in (model, *model.get("anyOf", ())):
            if names and schema.get("type") == "string":
                schema["enum"] = [*names]


def _without_null_defaults(schema: Any) -> Any:
    """A key that may be absent has no value then, and not the value null."""
    if isinstance(schema, list):
        return [_without_null_defaults(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_null_defaults(value) for key, value in schema.items() if not (key == "default" and value is None)
    }
