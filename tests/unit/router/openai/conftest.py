"""The HTTP half in a real server on a free port, over a scripted dispatching half."""

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI

from kvasir.common.metrics import Metrics
from kvasir.router.app import create_app
from kvasir.router.auth import api_keys as keys_of
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.http_server import running_http_server
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.bodies import Bodies, longest_prompt
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.reading import ModelHabits
from kvasir.router.openai.responses.api import ResponsesApi
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.openai.serving import Serving
from kvasir.router.openai.tokens import TokensApi
from kvasir.router.overview import OwnOverview
from kvasir.router.page.picture import take_picture
from kvasir.router.page.routes import add_page
from kvasir.router.pool import NodePool
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.tenants.budgets import MemoryBudgets
from kvasir.router.tenants.limiter import Limiter
from kvasir.router.tenants.tenant import NO_LIMITS, Limits
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import ChatTemplate
from kvasir.router.types import ClusterLimits, RoutedRequest
from tests.fake_dispatcher import FakeDispatcher, Step, play
from tests.plain_http import NO_TLS
from tests.tokenizers import SPECIAL_TOKENS, byte_level, save_byte_level
from tests.unit.router.openai.documented import check_answer

TOKENIZER = byte_level()
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'function' %}{{ raise_exception('no functions here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "<|end|>{% endfor %}{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
[EOS] = TOKENIZER.eos_token_ids
[END] = TOKENIZER.encode("<|end|>", add_special_tokens=False)
LIMITS = ClusterLimits(
    model_name="m", max_model_len=200, vocab_size=300, eos_token_ids=frozenset({END}), max_prompt_tokens=150
)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Router:
    """A running router, and the ways to ask it."""

    def __init__(self, app: FastAPI, port: int, dispatcher: FakeDispatcher, key: str) -> None:
        self.app = app
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.dispatcher = dispatcher
        self.key = key
        self.http = httpx.AsyncClient(
            base_url=self.url,
            timeout=60,
            verify=NO_TLS,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            event_hooks={"response": [check_answer]},
        )
        http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http
        )

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.http.post(path, json={"model": "m", **body})

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "p", **body})

    async def chat(self, content: str = "hi", **body: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": content}], **body})

    async def metric(self, name: str) -> float:
        """The sum over all labels that `name` leaves open."""
        text = (await self.http.get("/metrics")).text
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name)]
        return sum(float(value) for _, value in samples)


@asynccontextmanager
async def running_router(
    script: Callable[[RoutedRequest], Sequence[Step]],
    *,
    api_keys: Sequence[str] = (),
    limits: ClusterLimits = LIMITS,
    max_request_bytes: int = 1 << 20,
    habits: ModelHabits = ModelHabits(),  # noqa: B008, it is frozen
    trusts_requests: bool = False,
    key_limits: Limits = NO_LIMITS,
    isolates_tenants: bool = False,
    grammar_timeout_s: float = 60,  # how busy this machine is refuses no grammar
    grace_s: float = 1,
) -> AsyncIterator[Router]:
    dispatcher = FakeDispatcher(limits, script)
    folder = tempfile.TemporaryDirectory()
    grammars = GrammarChecker(save_byte_level(Path(folder.name)), num_workers=1, timeout_s=grammar_timeout_s)
    metrics = Metrics({"model_name": "m"})
    router_metrics = RouterMetrics(metrics)
    renderer = ChatRenderer(ChatTemplate(TEMPLATE, SPECIAL_TOKENS), trusts_requests=trusts_requests, timeout_s=60)
    limiter = Limiter(MemoryBudgets(), 600, lambda tenant, what: router_metrics.limited(tenant=tenant, limit=what))
    streams = KeptStreams(max_grace_s=60, max_streams=4, max_of_one=3 if api_keys else None)
    bodies = Bodies(lambda: longest_prompt(dispatcher, TOKENIZER), max_request_bytes)
    api = OpenAIApi(
        TenantBackend(dispatcher, limiter, isolates=isolates_tenants),
        TOKENIZER,
        renderer,
        model_names=["m", "org/m"],
        serving=Serving(router_metrics, bodies, streams),
        max_logprobs=5,
        habits=habits,
        grammars=grammars,
        created=1_700_000_000,
    )
    store = MemoryResponseStore(ttl_s=60, max_bytes=1 << 20)
    names = ["m", "org/m"]
    tokens = TokensApi(dispatcher, TOKENIZER, renderer, model_names=names, bodies=bodies)
    picture = partial(take_picture, NodePool(), router_metrics.recent, lambda: 0)
    overview = OwnOverview(dispatcher, metrics, router_metrics, picture)
    app = create_app(api, ResponsesApi(api, store), tokens, overview, keys_of(api_keys, key_limits), router_metrics)
    add_page(app, overview, router_metrics.recent)
    async with running_http_server(app, "127.0.0.1", 0, grace_s=grace_s) as server:
        router = Router(app, server.port, dispatcher, api_keys[0] if api_keys else "none")
        try:
            yield router
        finally:
            await router.http.aclose()
            await router.openai.close()
            await streams.close()
            await grammars.close()
            await bodies.close()
            folder.cleanup()


def saying(text: str, **options: object) -> Callable[[RoutedRequest], Sequence[Step]]:
    """A script: the text, and then the end token."""
    return lambda request: play([*ids(text), END], request, **options)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_router() -> AsyncIterator[Router]:
    async with running_router(saying("hello wörld")) as router:
        yield router


@pytest.fixture
def router(shared_router: Router) -> Router:
    """It always answers `hello wörld`. One server for all tests of a module: they share its event loop."""
    shared_router.dispatcher.requests.clear()
    return shared_router
