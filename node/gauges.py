"""What a node is asked about itself at every scrape."""

import asyncio
from collections.abc import Iterator

from kvasir.common.metrics import Sample
from kvasir.engine.stats import EngineStats


def engine_samples(stats: EngineStats, age_s: float) -> Iterator[Sample]:
    yield Sample("vllm:num_requests_running", "Requests with a seat.", stats.num_running + stats.num_loading)
    yield Sample("vllm:num_requests_waiting", "Requests without one.", stats.num_waiting)
    yield Sample("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage)
    yield _count("vllm:num_preemptions", "Requests that had to give their blocks away.", stats.num_preemptions)
    yield _count("kvasir:preemptions_swapped", "Of them, kept on the host meanwhile.", stats.num_swaps)
    yield _count("kvasir:preemptions_fetched", "Of them, fetched again from a store.", stats.num_refetches)
    yield Sample("kvasir:host_blocks", "Blocks of preempted requests on the host.", stats.num_host_blocks)
    yield _count("vllm:prefix_cache_queries", "Tokens looked up.", stats.num_prefix_queries_tokens)
    yield _count("vllm:prefix_cache_hits", "Tokens found.", stats.num_prefix_hits_tokens)
    yield _count("vllm:spec_decode_num_drafts", "Requests that had drafts, once a step.", stats.num_drafts)
    yield _count("vllm:spec_decode_num_draft_tokens", "Tokens proposed.", stats.num_draft_tokens)
    yield _count("vllm:spec_decode_num_accepted_tokens", "Of those, kept.", stats.num_accepted_tokens)
    yield _count("kvasir:prompt_tokens_computed", "Prompt tokens computed here.", stats.num_prompt_tokens_computed)
    yield Sample("kvasir:requests_loading", "Requests whose blocks or first token are on their way.", stats.num_loading)
    yield Sample("kvasir:queued_tokens", "Prompt tokens accepted and not computed yet.", stats.num_queued_tokens)
    yield Sample("kvasir:free_blocks", "Blocks free, or held by the prefix cache alone.", stats.num_free_blocks)
    yield Sample("kvasir:total_blocks", "Blocks there are.", stats.num_total_blocks)
    yield _count("kvasir:engine_steps", "Steps since the start.", stats.step)
    yield Sample("kvasir:engine_age_seconds", "Since the engine last finished a step or was idle.", age_s)


def process_samples(num_sessions: int, num_in_flight: int) -> Iterator[Sample]:
    yield Sample("kvasir:sessions", "Sessions with routers.", num_sessions)
    yield Sample("kvasir:session_requests", "Requests accepted and not ended.", num_in_flight)
    yield Sample("kvasir:asyncio_tasks", "Tasks on the event loop.", len(asyncio.all_tasks()))


def _count(name: str, help_text: str, value: float) -> Sample:
    return Sample(name, help_text, value, is_counter=True)
