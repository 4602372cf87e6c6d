"""A prompt's KV fetched from Redis, against computing it, by its length; and over a link that is too slow."""

import random
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvasir.bench.lab.contenders import EngineContender
from kvasir.bench.lab.kv_cases import SIZES, Places, ours
from kvasir.bench.lab.kv_mover import Mover
from kvasir.bench.lab.kv_throttle import slow_link
from kvasir.bench.lab.prompts import random_prompt
from kvasir.bench.lab.rounds import in_turns
from kvasir.bench.markdown import table
from kvasir.common.addresses import split_address

_LENGTHS = (32, 64, 128, 256, 512, 1024, 2000)
_BLOCK_TOKENS = 16
_SLOW_BYTES_PER_S = 20e6
_SIZE = "720 KiB"


@dataclass(frozen=True, slots=True)
class Fetch:
    s: float
    is_whole: bool  # or given up for computing, after so long


@dataclass(frozen=True, slots=True)
class Row:
    """Of one length, in medians. What is fetched is all blocks before the one with the last token."""

    num_tokens: int
    compute_s: float
    rest_s: float  # computing what is not in the blocks
    fetch_s: float
    slow: Fetch

    @property
    def fetched_s(self) -> float:
        return self.fetch_s + self.rest_s


def num_blocks(num_tokens: int) -> int:
    return (num_tokens - 1) // _BLOCK_TOKENS


def crossover(model: Path, places: Places, num_rounds: int) -> list[Row]:
    compute = compute_times(model, num_rounds)
    fast = fetch_times(places, compute, num_rounds)
    host, port = split_address(places.redis_url.removeprefix("redis://").partition("/")[0])
    with slow_link(host, port, _SLOW_BYTES_PER_S) as slow_port:
        slow = fetch_times(places, compute, 1, f"redis://127.0.0.1:{slow_port}/0")
    return [Row(n, compute[n], compute[n - num_blocks(n) * _BLOCK_TOKENS], fast[n].s, slow[n]) for n in _LENGTHS]


def compute_times(model: Path, num_rounds: int) -> dict[int, float]:
    engine, rng = EngineContender(model), random.Random(0)

    def compute_s(length: int) -> float:
        return engine.prefill_s(random_prompt(rng, length))

    lengths = sorted({*_LENGTHS, *(n - num_blocks(n) * _BLOCK_TOKENS for n in _LENGTHS)})
    works = {length: partial(compute_s, length) for length in lengths}
    times_s = in_turns(works, num_rounds, describe=lambda length, s: f"computing {length} tokens: {s * 1e3:.1f} ms")
    return {length: statistics.median(values) for length, values in times_s.items()}


def fetch_times(places: Places, compute: dict[int, float], num_rounds: int, through: str = "") -> dict[int, Fetch]:
    """`through`: where the receiver finds the server, if not where the sender does."""
    size = replace(SIZES[_SIZE], num_blocks=num_blocks(max(_LENGTHS)))
    mover = Mover(ours("redis", "redis"), size, places, {"redis_url": through} if through else {})

    def fetch(length: int) -> Fetch:
        taken_s, num_missing = mover.fetch(num_blocks(length), compute[length] / length)
        return Fetch(taken_s, is_whole=not num_missing)

    with closing(mover):
        works = {length: partial(fetch, length) for length in _LENGTHS}
        found = in_turns(
            works, num_rounds, describe=lambda length, one: f"fetching {length} tokens: {one.s * 1e3:.1f} ms"
        )
    return {length: _median(fetches) for length, fetches in found.items()}


def _median(fetches: Sequence[Fetch]) -> Fetch:
    return sorted(fetches, key=lambda fetch: fetch.s)[len(fetches) // 2]


def as_markdown(rows: Sequence[Row]) -> list[str]:
    slow = f"{_SLOW_BYTES_PER_S / 1e6:.0f} MB/s"
    lines = [
        "## A prompt of the built-in model: from Redis, or computed",
        "",
        "Fetched: all blocks but the last token's, and that computed. The engine has all cores; medians. Fetching pays",
        f"as long as the link gives what the next column says; the last one is measured over a link of {slow}.",
        "",
    ]
    header = f"prompt tokens | computed ms | fetched ms | of it the rest's computing | pays from MB/s | at {slow}"
    first = next((row.num_tokens for row in rows if row.fetched_s < row.compute_s), None)
    crossing = f"from {first} tokens on" if first else "at none of these lengths"
    lines += table(header, [_cells(row) for row in rows], num_texts=0)
    return [*lines, "", f"On this machine fetching from Redis is faster {crossing}.", ""]


def _cells(row: Row) -> list[str]:
    num_bytes = num_blocks(row.num_tokens) * SIZES[_SIZE].layout.bytes_per_block
    pays_from = num_bytes / (row.compute_s - row.rest_s) / 1e6 if row.compute_s > row.rest_s else float("inf")
    times_ms = (f"{1e3 * s:.1f}" for s in (row.compute_s, row.fetched_s, row.rest_s))
    verdict = "fetched in" if row.slow.is_whole else "given up for computing, after"
    return [str(row.num_tokens), *times_ms, f"{pays_from:.0f}", f"{verdict} {1e3 * row.slow.s:.0f} ms"]
