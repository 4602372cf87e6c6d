"""Pages of other sites: let in where the operator says so, and then with their key like anybody."""

from kvasir.router.app import allow_origins
from kvasir.router.config import RouterConfig
from tests.unit.router.openai.conftest import running_router, saying

ORIGIN = "https://chat.example"
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
PATH = "/v1/chat/completions"


async def test_a_page_of_a_named_site_may_ask() -> None:
    async with running_router(saying("hello"), api_keys=["right"]) as router:
        allow_origins(router.app, RouterConfig(allowed_origins=[ORIGIN]))
        keyless = {"authorization": ""}
        preflight = await router.http.request("OPTIONS", PATH, headers=ASKS | keyless)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        other = await router.http.request("OPTIONS", PATH, headers=ASKS | keyless | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        for stream in (False, True):
            answer = await router.http.post(PATH, json=body | {"stream": stream}, headers={"origin": ORIGIN})
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "data: [DONE]" in answer.text if stream else "hello" in answer.text
        refused = await router.http.post(PATH, json=body, headers={"origin": ORIGIN} | keyless)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert (await router.http.request("OPTIONS", PATH, headers=keyless)).status_code == 401


async def test_no_other_site_is_let_in_by_default() -> None:
    async with running_router(saying("hello")) as router:
        allow_origins(router.app, RouterConfig())
        answer = await router.http.request("OPTIONS", PATH, headers=ASKS)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
