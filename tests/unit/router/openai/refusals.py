"""What a refusal looks like, and a router that has survived it."""

from typing import Any

import httpx

from tests.unit.router.openai.conftest import Router

MESSAGES = [{"role": "user", "content": "hi"}]


def check(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


async def is_healthy(router: Router) -> bool:
    num_before = len(router.dispatcher.requests)
    response = await router.complete(prompt="fine")
    return response.status_code == 200 and len(router.dispatcher.requests) == num_before + 1
