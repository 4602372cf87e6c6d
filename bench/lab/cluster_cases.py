"""What a cluster adds to the computing: hops on the way to the first token, KV blocks on the way to the second."""

import random
import statistics
from dataclasses import dataclass

from kvasir.bench.lab.local_cluster import ClusterContender, read_metrics
from kvasir.bench.lab.prompts import random_prompt

_TTFT = "vllm:time_to_first_token_seconds"
_NUM_SHORT = 20
_NUM_LONG = 5
_LONG_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str


def hop_figures(cluster: ClusterContender, rng: random.Random) -> list[Figure]:
    """TTFT at the client less TTFT within the prefill node, over short prompts, one at a time."""
    before = read_metrics(cluster.prefill_metrics_url)
    ttfts_s = [cluster.run([random_prompt(rng, 32)], num_tokens=2)[0].ttft_s for _ in range(_NUM_SHORT)]
    after = read_metrics(cluster.prefill_metrics_url)
    num_seen = after[f"{_TTFT}_count"] - before[f"{_TTFT}_count"]
    if num_seen != _NUM_SHORT:
        raise RuntimeError(f"{num_seen:g} of {_NUM_SHORT} prompts went through the prefill node: nothing to compare")
    within_s = (after[f"{_TTFT}_sum"] - before[f"{_TTFT}_sum"]) / num_seen
    client_s = statistics.fmean(ttfts_s)
    return [
        Figure("TTFT of a 32-token prompt at the client (mean)", client_s * 1e3, "ms"),
        Figure("  within the prefill node (mean)", within_s * 1e3, "ms"),
        Figure("  added by client, router and hops", (client_s - within_s) * 1e3, "ms"),
    ]


def transfer_figures(cluster: ClusterContender, rng: random.Random) -> list[Figure]:
    """What of a long prompt's transfer shows as a longer wait for the second token."""
    before = read_metrics(cluster.decode_metrics_url)
    timelines = [cluster.run([random_prompt(rng, _LONG_TOKENS)], num_tokens=12)[0] for _ in range(_NUM_LONG)]
    after = read_metrics(cluster.decode_metrics_url)
    rose = {name: after[name] - before.get(name, 0.0) for name in after}
    first_gap_s = statistics.median(timeline.itls_s[0] for timeline in timelines)
    later_gap_s = statistics.median(gap for timeline in timelines for gap in timeline.itls_s[1:])
    transfer_s = rose["kvasir:kv_transfer_seconds_total"] / _NUM_LONG
    overlapped_s = rose["kvasir:kv_overlapped_seconds_total"] / _NUM_LONG
    return [
        Figure("TTFT of a 2000-token prompt (median)", statistics.median(t.ttft_s for t in timelines) * 1e3, "ms"),
        Figure("  blocks fetched by the decode node, each", rose["kvasir:kv_blocks_fetched_total"] / _NUM_LONG, ""),
        Figure("  prompt tokens computed there instead", rose["kvasir:prompt_tokens_recomputed_total"], ""),
        Figure("  KV moved, each", rose["kvasir:kv_bytes_fetched_total"] / _NUM_LONG / 1e6, "MB"),
        Figure("  time during which blocks moved", transfer_s * 1e3, "ms"),
        Figure("  of it beside the prefill", overlapped_s * 1e3, "ms"),
        Figure("  first token to second (median)", first_gap_s * 1e3, "ms"),
        Figure("  later gaps (median)", later_gap_s * 1e3, "ms"),
        Figure("  transfer that shows: the difference", (first_gap_s - later_gap_s) * 1e3, "ms"),
    ]
