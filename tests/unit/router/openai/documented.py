"""Holds an answer to what the OpenAPI document says of it."""

import json
import re
from functools import cache
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from kvasir.router.docs.openapi import openapi_document

DOCUMENT = openapi_document()
ERROR = {"$ref": "#/components/schemas/Error"}


async def check_answer(response: httpx.Response) -> None:
    """For httpx's event hooks: every answer in JSON is one that the document knows."""
    if response.headers.get("content-type", "").startswith("application/json"):
        await response.aread()
        check(response)


def check(response: httpx.Response) -> None:
    schema = _schema(response.request.method, response.url.path, str(response.status_code))
    problems = [problem.message for problem in _validator(json.dumps(schema)).iter_errors(response.json())]
    assert not problems, (str(response.request.url), problems[:3])


def check_events(path: str, chunks: list[Any]) -> None:
    """What a stream's events hold."""
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    validator = _validator(json.dumps(content["x-event-data"]))
    for chunk in chunks:
        problems = [problem.message for problem in validator.iter_errors(chunk)]
        assert not problems, (chunk, problems[:3])


def _schema(method: str, path: str, status: str) -> Any:
    for template, methods in DOCUMENT["paths"].items():
        pattern = re.sub(r"\\\{name\\\}", ".+", re.escape(template))
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", pattern), path) and method.lower() in methods:
            answers = methods[method.lower()]["responses"]
            assert status in answers, f"the document does not know a {status} of {method} {path}"
            return answers[status]["content"]["application/json"]["schema"]
    assert status in ("401", "404", "405"), f"the document does not know {method} {path}"
    return ERROR


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**json.loads(schema), "components": DOCUMENT["components"]})
