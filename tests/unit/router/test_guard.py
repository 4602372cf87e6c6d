"""Keys on every route but the open ones, whatever a path looks like; request ids; faults of our own."""

import asyncio
import base64
import logging
import re

import httpx
import pytest
from starlette.routing import Route

from kvasir.router.auth import OPEN_PATHS, api_keys
from tests.unit.router.openai.conftest import Router, running_router, saying

ODD = [
    "//v1/completions", "/V1/completions", "/v1/../v1/completions", "/v1/completions/", "/./v1/completions",
    "/health/../v1/models", "/health/", "//health", "/health%2f..%2fv1/models", "/ready?x=/v1", "/health;x", "/", "/x",
    "/%76%31/completions", "/version/../metrics", "/docs", "/openapi.json", "*",
    "/metrics%0a", "/health%0A",
]  # fmt: skip


def routes(router: Router) -> list[str]:
    """All that there are but the open ones."""
    paths = [re.sub(r"{[^}]*}", "m", route.path) for route in router.app.routes if isinstance(route, Route)]
    assert "/v1/chat/completions" in paths
    return [path for path in paths if path not in OPEN_PATHS]


async def raw(router: Router, method: str, target: str, headers: str = "") -> int:
    """The status; the target goes out as it is, which no client library would do."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(
        f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n{headers}\r\n".encode()
    )
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("headers", ["", "authorization: Bearer wrong\r\n", "authorization: right\r\n",
    "authorization: Basic right\r\n", "authorization: Bearer ri ght\r\n", "authorization: Bearer\r\n",
    "authorization: Bearer right2\r\n", "authorization: Bearer righ\r\n", "x-api-key: right\r\n",
    "authorization: Bearer \xff\xfe\r\n"], ids=range(10))  # fmt: skip
async def test_nothing_passes_without_a_key(headers: str) -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router:
        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            for target in (*routes(router), *ODD):
                status = await raw(router, method, target, headers)
                expected = {200, 405} if target in ("/ready?x=/v1",) else {400, 401}
                assert status in expected, (method, target, status)
        assert router.dispatcher.requests == []


async def test_spaces_around_a_key_are_not_of_it() -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router:
        for value in ("Bearer  right", "bearer right ", " Bearer   right  "):
            assert await raw(router, "GET", "/v1/models", f"authorization: {value}\r\n") == 200


async def test_the_open_routes_need_no_key() -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router:
        for path in ("/health", "/ready", "/version"):
            assert await raw(router, "GET", path) == 200


async def test_with_a_key_odd_paths_lead_nowhere() -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router:
        for target in routes(router):
            known = (200, 404, 405) if "/responses/" in target or target.startswith("/page/") else (200, 405)
            assert await raw(router, "GET", target, "authorization: Bearer right\r\n") in known
        for target in ODD:
            status = await raw(router, "POST", target, "authorization: bearer right\r\n")
            is_known = target == "/" or target.startswith(("/ready?", "/docs", "/openapi.json"))
            assert status in ((405,) if is_known else (400, 404)), target


async def test_no_key_is_written_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_router(lambda _: [RuntimeError("bug")], api_keys=["right-key"]) as router:
        for headers in ("authorization: Bearer right-key\r\n", "authorization: Bearer wrong-key\r\n"):
            for target in ("/v1/models", "/v1/completions"):
                await raw(router, "POST", target, headers)
        assert (await router.complete()).status_code == 500
    assert caplog.records
    assert "right-key" not in caplog.text
    assert "wrong-key" not in caplog.text


async def test_a_refusal_is_openais() -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router, httpx.AsyncClient() as client:
        response = await client.post(f"{router.url}/v1/completions", json={})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_keys_are_kept_as_digests_only() -> None:
    keys = api_keys(["one-secret", "two-secrets"])
    assert "secret" not in repr(vars(keys))

    def allows(authorization: str, **headers: str) -> bool:
        return keys.tenant("/v1/models", {"authorization": authorization} | headers) is not None

    assert allows("Bearer one-secret")
    assert allows("bearer two-secrets")
    assert not allows("Bearer one-secrettwo-secrets")
    assert not allows("")
    assert api_keys([]).tenant("/v1/models", {}) is not None


async def test_request_ids_come_back_or_are_made(caplog: pytest.LogCaptureFixture) -> None:
    async with running_router(saying("x")) as router:
        given = await router.http.get("/health", headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        for bad in ("x" * 129, "a\tb", ""):
            made = await router.http.get("/health", headers={"x-request-id": bad})
            assert len(made.headers["x-request-id"]) == 32
        response = await router.complete(stream=True)
        assert len(response.headers["x-request-id"]) == 32
        caplog.clear()


async def test_a_fault_of_our_own_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with running_router(lambda _: [RuntimeError("secret detail")]) as router:
        with caplog.at_level(logging.ERROR):
            response = await router.complete()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret detail" not in response.text
        assert "secret detail" in caplog.text


async def test_health_and_readiness_are_two_things() -> None:
    async with running_router(saying("x")) as router:
        router.dispatcher.is_ready = False
        not_ready = await router.http.get("/ready")
        assert (not_ready.status_code, not_ready.json()["reason"][:15]) == (503, "the last canary")
        router.dispatcher.has_nodes = False
        assert (await router.http.get("/ready")).json()["reason"] == "no decode node is here"
        for query in ("prefill=-1", "decode=-1", "prefill=one"):
            refused = await router.http.get(f"/ready?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "prefill and decode are numbers of nodes"
        assert (await router.http.get("/health")).status_code == 200
        response = await router.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_browser_may_send_the_key_as_a_password_but_not_for_another_sites_page() -> None:
    keys = api_keys(["one:secret"])

    def allows(credentials: bytes, site: str) -> bool:
        headers = {"authorization": "Basic " + base64.b64encode(credentials).decode(), "sec-fetch-site": site}
        return keys.tenant("/v1/models", headers) is not None

    assert allows(b"anybody:one:secret", "none")
    assert allows(b":one:secret", "same-origin")
    assert not allows(b"one:secret", "none")
    assert not allows(b"anybody:one:secret", "cross-site")
    assert not allows(b"anybody:one:secret", "same-site")
    for broken in ("Basic", "Basic ===", "Basic \xff", "Basic YTpv\x00"):
        assert keys.tenant("/v1/models", {"authorization": broken}) is None


async def test_the_page_asks_a_browser_for_the_key() -> None:
    async with running_router(saying("x"), api_keys=["right"]) as router, httpx.AsyncClient() as client:
        assert (await client.get(f"{router.url}/")).headers["www-authenticate"].startswith("Basic")
        assert (await client.get(f"{router.url}/v1/models")).headers["www-authenticate"] == "Bearer"
