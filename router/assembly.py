"""A router put together from its configuration."""

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from kvasir.common.metrics import Metrics
from kvasir.common.secrets import cluster_secret
from kvasir.router.app import allow_origins, create_app
from kvasir.router.auth import api_keys
from kvasir.router.cluster import Cluster, running_cluster
from kvasir.router.config import RouterConfig
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.bodies import Bodies, longest_prompt
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.noted_streams import NotedStreams
from kvasir.router.openai.reading import habits_of
from kvasir.router.openai.redis_notes import RedisNotes
from kvasir.router.openai.responses.api import ResponsesApi
from kvasir.router.openai.responses.redis_store import RedisResponseStore
from kvasir.router.openai.responses.store import MemoryResponseStore, ResponseStore
from kvasir.router.openai.serving import Serving
from kvasir.router.openai.stream_notes import Notes
from kvasir.router.openai.tokens import TokensApi
from kvasir.router.overview import Overview, OwnOverview
from kvasir.router.page.picture import take_picture
from kvasir.router.page.routes import add_page
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.tenants.budgets import Budgets, MemoryBudgets
from kvasir.router.tenants.limiter import Limiter
from kvasir.router.tenants.redis_budgets import RedisBudgets
from kvasir.router.tenants.tenant import Limits
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import ChatTemplate, find_template
from kvasir.router.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


class Alone:
    """What a router that is one process keeps itself. One of several shares it with the others: see `workers`."""

    listens_for_nodes = True

    def memory_budgets(self) -> Budgets:
        return MemoryBudgets()

    def memory_store(self, config: RouterConfig) -> ResponseStore:
        return MemoryResponseStore(ttl_s=config.response_store_ttl_s, max_bytes=config.response_store_bytes)

    def streams(self, config: RouterConfig, notes: Notes | None) -> KeptStreams:
        """`notes`: where several routers note them."""
        max_grace_s, max_streams = config.max_resume_grace_s, config.max_resumable_streams
        max_of_one = config.max_resumable_streams_of_one
        if notes is None:
            return KeptStreams(max_grace_s=max_grace_s, max_streams=max_streams, max_of_one=max_of_one)
        return NotedStreams(notes, max_grace_s=max_grace_s, max_streams=max_streams, max_of_one=max_of_one)

    def overview(self, own: OwnOverview) -> Overview:
        return own


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    app: FastAPI
    names: tuple[str, ...]  # of the model
    cluster: Cluster
    streams: KeptStreams
    overview: OwnOverview


@asynccontextmanager
async def running_router(config: RouterConfig, sharing: Alone) -> AsyncIterator[Router]:
    """Everything but the HTTP server. Raises ValueError, OSError and UnsupportedTokenizer for what cannot be served."""
    if config.model is None:
        raise ValueError("--model wants the directory with the model's tokenizer")
    names = config.served_model_name or [config.model.resolve().name]
    secret = cluster_secret(os.environ, None if config.cluster_secret_file is None else str(config.cluster_secret_file))
    metrics = Metrics({"model_name": names[0]})
    router_metrics = RouterMetrics(metrics)
    keys = api_keys(config.api_key, limits_of(config), config.api_key_file)
    async with AsyncExitStack() as stack:
        tokenizer = TextTokenizer.load(config.model)
        stack.callback(tokenizer.close)
        source = find_template(config.model) if config.chat_template is None else _read(config.chat_template)
        template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
        renderer = ChatRenderer(template, trusts_requests=config.trust_request_chat_template)
        stack.callback(renderer.close)
        store = _response_store(config, sharing)
        stack.push_async_callback(store.close)
        grammars = _grammars(config)
        stack.push_async_callback(grammars.close)
        limiter = _limiter(config, sharing.memory_budgets, router_metrics)
        stack.push_async_callback(limiter.close)
        cluster = await stack.enter_async_context(
            running_cluster(config, secret, metrics, listens=sharing.listens_for_nodes)
        )
        streams = sharing.streams(config, _stream_notes(config, router_metrics))
        stack.push_async_callback(streams.close)
        bodies = Bodies(lambda: longest_prompt(cluster.dispatcher, tokenizer), config.max_request_bytes)
        stack.push_async_callback(bodies.close)
        api = OpenAIApi(
            TenantBackend(cluster.dispatcher, limiter, isolates=config.isolate_tenants),
            tokenizer,
            renderer,
            model_names=names,
            serving=Serving(router_metrics, bodies, streams),
            max_logprobs=config.max_logprobs,
            habits=habits_of(
                source,
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                enable_auto_tool_choice=config.enable_auto_tool_choice,
            ),
            grammars=grammars,
            created=int(config.model.stat().st_mtime),
        )
        tokens = TokensApi(cluster.dispatcher, tokenizer, renderer, model_names=names, bodies=bodies)
        picture = partial(take_picture, cluster.pool, router_metrics.recent, lambda: cluster.queue.num_waiting)
        own = OwnOverview(cluster.dispatcher, metrics, router_metrics, picture)
        overview = sharing.overview(own)
        app = create_app(
            api,
            ResponsesApi(api, store),
            tokens,
            overview,
            keys,
            router_metrics,
            isolates_tenants=config.isolate_tenants and keys.are_wanted,
        )
        allow_origins(app, config)
        add_page(app, overview, router_metrics.recent)
        yield Router(app=app, names=tuple(names), cluster=cluster, streams=streams, overview=own)


def limits_of(config: RouterConfig) -> Limits:
    return Limits(
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_concurrent_requests=config.max_concurrent_requests,
    )


def _response_store(config: RouterConfig, sharing: Alone) -> ResponseStore:
    if config.response_store_url is None:
        return sharing.memory_store(config)
    return RedisResponseStore(config.response_store_url, ttl_s=config.response_store_ttl_s)


def _grammars(config: RouterConfig) -> GrammarChecker:
    assert config.model is not None
    return GrammarChecker(
        config.model / "tokenizer.json",
        num_workers=config.grammar_workers,
        timeout_s=config.grammar_timeout_s,
        max_source_bytes=config.max_grammar_bytes,
    )


def _limiter(config: RouterConfig, memory_budgets: Callable[[], Budgets], metrics: RouterMetrics) -> Limiter:
    budgets = (
        RedisBudgets(config.limits_redis_url, on_failure=metrics.limits_failures)
        if config.limits_redis_url
        else memory_budgets()
    )
    return Limiter(budgets, config.request_timeout_s, lambda tenant, what: metrics.limited(tenant=tenant, limit=what))


def _stream_notes(config: RouterConfig, metrics: RouterMetrics) -> Notes | None:
    if not config.streams_redis_url:
        return None
    return RedisNotes(
        config.streams_redis_url,
        max_life_s=config.request_timeout_s,
        max_grace_s=config.max_resume_grace_s,
        max_bytes=config.streams_redis_bytes,
        on_failure=metrics.streams_failures,
    )


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
