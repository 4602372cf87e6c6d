"""The OpenAPI document as one page: no script, nothing from elsewhere."""

from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top; }
td:first-child { white-space: nowrap; }
"""


def docs_page(document: dict[str, Any]) -> str:
    info = document["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><body><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} The same as JSON: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>")
            parts.append(_rows("Parameters", [(one["name"], one["schema"]) for one in operation.get("parameters", ())]))
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts.append(_fold("Request body", body))
            parts += [_answer(status, answer) for status, answer in operation["responses"].items()]
    parts.append("<h2>Schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        title = f"<summary id='{escape(name)}'><code>{escape(name)}</code></summary>"
        parts.append(f"<details>{title}{_members(schema)}</details>")
    return "\n".join(parts)


def _answer(status: str, answer: dict[str, Any]) -> str:
    types = "; ".join(
        f"{escape(media_type)}: {_type(content.get('x-event-data', content['schema']))}"
        for media_type, content in answer["content"].items()
    )
    return f"<div><b>{status}</b> {escape(answer['description'])} <small>{types}</small></div>"


def _fold(title: str, schema: dict[str, Any]) -> str:
    return f"<div>{title}: {_type(schema)}</div>"


def _members(schema: dict[str, Any]) -> str:
    text = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return text + _rows("", list(schema.get("properties", {}).items()), frozenset(schema.get("required", ())))


def _rows(title: str, members: list[tuple[str, Any]], required: frozenset[str] = frozenset()) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}<td>{_type(schema)}"
        for name, schema in members
    )
    return f"<div>{title}</div><table>{rows}</table>" if rows else ""


def _type(schema: Any) -> str:
    """{'anyOf': [{'type': 'integer', 'minimum': 1}, {'type': 'null'}]} -> integer (minimum 1) or null"""
    if not isinstance(schema, dict):
        return "anything"
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(option) for option in schema[key])
    if "const" in schema or "enum" in schema:
        return ", ".join(escape(repr(value)) for value in schema.get("enum", [schema.get("const")]))
    bounds = [
        f"{name} {schema[name]}"
        for name in ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
        if name in schema
    ]
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    return kind + (f" <small>({escape(', '.join(bounds))})</small>" if bounds else "")
