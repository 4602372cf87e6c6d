"""A router as a process: what it is made of, and how it starts and stops."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from kvasir.common.metrics import Metrics
from kvasir.common.secrets import cluster_secret
from kvasir.router.app import create_app
from kvasir.router.auth import api_keys
from kvasir.router.cluster import running_cluster
from kvasir.router.config import RouterConfig
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.http_server import running_http_server
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.reading import habits_of
from kvasir.router.openai.responses.api import ResponsesApi
from kvasir.router.openai.responses.stores import response_store
from kvasir.router.openai.tokens import TokensApi
from kvasir.router.page.routes import add_page
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.tenants.budgets import MemoryBudgets
from kvasir.router.tenants.limiter import Limiter
from kvasir.router.tenants.redis_budgets import RedisBudgets
from kvasir.router.tenants.tenant import Limits
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.chat_template import ChatTemplate, find_template
from kvasir.router.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


async def serve(config: RouterConfig) -> None:
    """Until a signal comes. Requests that run then may end within the grace time; a second signal ends that too."""
    if config.model is None:
        raise ValueError("--model wants the directory with the model's tokenizer")
    names = config.served_model_name or [config.model.resolve().name]
    tokenizer = TextTokenizer.load(config.model)
    source = find_template(config.model) if config.chat_template is None else _read(config.chat_template)
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    renderer = ChatRenderer(template, trusts_requests=config.trust_request_chat_template)
    grammars = GrammarChecker(
        config.model / "tokenizer.json",
        num_workers=config.grammar_workers,
        timeout_s=config.grammar_timeout_s,
        max_source_bytes=config.max_grammar_bytes,
    )
    secret = cluster_secret(os.environ, None if config.cluster_secret_file is None else str(config.cluster_secret_file))
    store = response_store(
        config.response_store_url, ttl_s=config.response_store_ttl_s, max_bytes=config.response_store_bytes
    )
    metrics = Metrics({"model_name": names[0]})
    limits = Limits(
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_concurrent_requests=config.max_concurrent_requests,
    )
    keys = api_keys(config.api_key, limits, config.api_key_file)
    router_metrics = RouterMetrics(metrics)
    limiter = Limiter(
        RedisBudgets(config.limits_redis_url, on_failure=router_metrics.limits_failures)
        if config.limits_redis_url
        else MemoryBudgets(),
        config.request_timeout_s,
        lambda tenant, what: router_metrics.limited(tenant=tenant, limit=what),
    )
    streams = KeptStreams(max_grace_s=config.max_resume_grace_s, max_streams=config.max_resumable_streams)
    stop = _StopSignals()
    async with running_cluster(config, secret, metrics) as cluster:
        api = OpenAIApi(
            TenantBackend(cluster.dispatcher, limiter, isolates=config.isolate_tenants),
            tokenizer,
            renderer,
            router_metrics,
            model_names=names,
            max_request_bytes=config.max_request_bytes,
            max_logprobs=config.max_logprobs,
            habits=habits_of(
                source,
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                enable_auto_tool_choice=config.enable_auto_tool_choice,
            ),
            grammars=grammars,
            streams=streams,
        )
        responses = ResponsesApi(api, store)
        tokens = TokensApi(
            cluster.dispatcher, tokenizer, renderer, model_names=names, max_request_bytes=config.max_request_bytes
        )
        app = create_app(api, responses, tokens, cluster.dispatcher, keys, metrics, router_metrics)
        add_page(app, cluster.pool, router_metrics.recent, lambda: cluster.queue.num_waiting)
        async with running_http_server(app, config.host, config.port, config.shutdown_grace_s) as server:
            stop.on_second = server.hurry
            log.info("serving %s on http://%s:%d", ", ".join(names), config.host, server.port)
            await stop.first.wait()
            log.info("stopping: requests that run may end within %g s", config.shutdown_grace_s)
        await streams.close()
    await limiter.close()
    await grammars.close()
    await store.close()
    renderer.close()
    tokenizer.close()
    log.info("stopped")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


class _StopSignals:
    """SIGTERM and SIGINT, from now on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.on_second: Callable[[], None] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        if self.first.is_set():
            self.on_second()
        self.first.set()
