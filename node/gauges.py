"""What a node is asked about itself, and about the blocks that it moves, at every scrape."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from kvasir.common.metrics import Sample
from kvasir.engine.stats import EngineStats
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.receiver import KVReceiver
from kvasir.kv_connector.sender import KVSender


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


def transfer_samples(
    connector: str, metrics: TransferMetrics, sender: KVSender, receiver: KVReceiver
) -> Iterator[Sample]:
    for sample in (*_incoming(metrics, receiver), *_outgoing(metrics, sender), *_bandwidths(sender, receiver)):
        yield replace(sample, labels={"connector": connector, **sample.labels})


def _incoming(metrics: TransferMetrics, receiver: KVReceiver) -> Iterator[Sample]:
    yield _count("kvasir:kv_transfers", "Transfers received.", metrics.transfers)
    yield _count("kvasir:kv_blocks_fetched", "Blocks that came from elsewhere.", metrics.blocks_fetched)
    yield _count("kvasir:kv_bytes_fetched", "Their bytes, as they travelled.", metrics.bytes_fetched)
    yield _count("kvasir:kv_blocks_inexact", "Of those: of another dtype, or a lossy codec.", metrics.blocks_inexact)
    yield _count("kvasir:kv_transfer_seconds", "Time in which blocks were being fetched.", metrics.transfer_s)
    yield _count("kvasir:kv_overlapped_seconds", "The part of it beside the prefill.", metrics.overlapped_s)
    yield _count("kvasir:kv_retries", "Blocks asked for again.", metrics.retries)
    yield _count("kvasir:kv_declined", "Transfers, or their rest, given up for computing.", metrics.declined)
    yield Sample("kvasir:kv_transfers_running", "Transfers that have not ended.", receiver.num_transfers)
    yield Sample("kvasir:kv_blocks_outstanding", "Published and not here yet.", receiver.num_outstanding_blocks)
    for reason in MissReason:
        yield _count("kvasir:kv_misses", "Blocks refused or given up.", metrics.misses[reason], reason=reason.value)


def _outgoing(metrics: TransferMetrics, sender: KVSender) -> Iterator[Sample]:
    yield Sample("kvasir:kv_leased_blocks", "Blocks kept for a receiver, or being stored.", sender.num_leased_blocks)
    yield Sample("kvasir:kv_leases", "Transfers whose blocks are kept.", sender.num_leases)
    yield Sample("kvasir:kv_blocks_lent", "Blocks that a transport reads now.", sender.num_borrowed_blocks)
    yield _count("kvasir:kv_leases_expired", "Transfers that nobody fetched in time.", metrics.leases_expired)
    yield _count("kvasir:kv_blocks_sent", "Blocks handed to the transport.", metrics.blocks_sent)
    yield _count("kvasir:kv_bytes_sent", "Their bytes, as they travelled.", metrics.bytes_sent)
    yield _count("kvasir:kv_send_seconds", "Time in which the transport held any.", metrics.send_s)
    yield _count("kvasir:kv_blocks_stored", "Blocks written to the store.", metrics.blocks_stored)
    yield _count("kvasir:kv_bytes_stored", "Their bytes, as they were written.", metrics.bytes_stored)
    yield _count("kvasir:kv_store_seconds", "Time in which they were being written.", metrics.store_s)
    yield _count("kvasir:kv_blocks_already_stored", "Blocks the store had.", metrics.blocks_already_stored)
    yield _count("kvasir:kv_blocks_not_stored", "Blocks that it was not given.", metrics.blocks_not_stored)
    for direction in ("reading", "writing"):
        value = metrics.failures[direction]
        yield _count("kvasir:kv_store_failures", "Calls to the store that failed.", value, direction=direction)


def _bandwidths(sender: KVSender, receiver: KVReceiver) -> Iterator[Sample]:
    name, help_text = "kvasir:kv_bandwidth_bytes_per_second", "As last measured."
    if sender.bandwidth_bytes_per_s is not None:
        yield Sample(name, help_text, sender.bandwidth_bytes_per_s, {"direction": "out", "peer": ""})
    for source, rate in receiver.rates.known().items():
        yield Sample(name, help_text, rate.bandwidth_bytes_per_s, {"direction": "in", "peer": source})


def process_samples(num_sessions: int, num_in_flight: int) -> Iterator[Sample]:
    yield Sample("kvasir:sessions", "Sessions with routers.", num_sessions)
    yield Sample("kvasir:session_requests", "Requests accepted and not ended.", num_in_flight)
    yield Sample("kvasir:asyncio_tasks", "Tasks on the event loop.", len(asyncio.all_tasks()))


def _count(name: str, help_text: str, value: float, **labels: str) -> Sample:
    return Sample(name, help_text, value, labels, is_counter=True)
