"""`kvasir bench preemption`: out of blocks, compute again or keep on the host? By length, by bandwidth, under pressure.

Our own engine with the built-in model, in this process. A slow way to the host is a copy that takes as long as it
would. Written to a folder as a table.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.cli.model import prepare_builtin_model
from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.host_blocks import HostBlocks
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.preemption import Choice, Loss, Rates, Way, choose_way
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.engine.swap_space import HostBlock, SwapSpace

_BLOCK_SIZE = 16
_LENGTHS = (64, 256, 512, 1024, 2000)
_BANDWIDTHS = (None, 200e6, 50e6, 20e6, 8e6)  # bytes/s; None: what copying takes
_PRESSED = (None, 100e6, 20e6)
_NUM_BLOCKS = 130  # of the cache: the longest context, and a few
_NUM_BLOCKS_PRESSED = 80
_NUM_HOST_BLOCKS = 160
_VOCABULARY = 40_000


class SlowHost(HostBlocks):
    """Each copy takes as long as it would over a bus of that bandwidth."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        super().__init__(kv_cache, num_blocks)
        self._bytes_per_block = kv_cache.layout.bytes_per_block
        self.bytes_per_s: float | None = None

    def save(self, block: BlockId, place: HostBlock) -> None:
        self._timed(lambda: super(SlowHost, self).save(block, place))

    def load(self, place: HostBlock, block: BlockId) -> None:
        self._timed(lambda: super(SlowHost, self).load(place, block))

    def _timed(self, copy: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        copy()
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, started_s + self._bytes_per_block / self.bytes_per_s - time.perf_counter()))


def always_swap(loss: Loss, rates: Rates, num_host_blocks: int) -> Choice:
    fits = 0 < loss.num_own_blocks <= num_host_blocks
    return Choice(Way.SWAP if fits else Way.RECOMPUTE, 0.0)


def always_recompute(loss: Loss, rates: Rates, num_host_blocks: int) -> Choice:
    return Choice(Way.RECOMPUTE, 0.0)


RULES = {"recompute": always_recompute, "swap": always_swap, "choosing": choose_way}


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one workload, from the first step to the last token."""

    seconds: float
    num_preemptions: int
    num_swaps: int


class PreemptionLab:
    def __init__(self, model: Path) -> None:
        one_block = 2 * 30 * 3 * _BLOCK_SIZE * 64 * 4
        settings = EngineSettings(model=str(model), kv_cache_memory=_NUM_BLOCKS * one_block, watermark=0.0)
        self.engine, self.kv_cache, _ = build_engine(settings)
        self.host = SlowHost(self.kv_cache, _NUM_HOST_BLOCKS)
        self._rng = random.Random(0)

    def compute_s(self, num_tokens: int) -> float:
        """A prompt of that length, without anything of it cached."""
        return finish(self.engine, [self._request("r", num_tokens, 1)])

    def copy_s_per_block(self, bytes_per_s: float | None, num_blocks: int = 8) -> float:
        """One way, the mean of out and in."""
        self.host.bytes_per_s = bytes_per_s
        space = SwapSpace(num_blocks, self.host)
        blocks = [BlockId(i) for i in range(num_blocks)]
        for _ in range(2):
            places = space.save(blocks)
            space.load(places, blocks)
            space.release(places)
        assert space.copy_s_per_block is not None
        return space.copy_s_per_block

    def under_pressure(self, rule: str, bytes_per_s: float | None, num_requests: int, num_tokens: int) -> Run:
        """More requests at once than the cache can hold when they are done. Every run has prompts of its own."""
        engine, scheduler = self.engine, self.engine.scheduler
        self.host.bytes_per_s = bytes_per_s
        scheduler.tables.swap = SwapSpace(_NUM_HOST_BLOCKS, self.host)
        scheduler.choose_way = RULES[rule]
        before = engine.stats()
        requests = [self._request(str(i), 64 + 32 * (i % 5), num_tokens) for i in range(num_requests)]
        taken = scheduler.tables.pool.allocate(_NUM_BLOCKS - _NUM_BLOCKS_PRESSED)
        assert taken is not None
        seconds = finish(engine, requests)
        scheduler.tables.pool.release(taken)
        after = engine.stats()
        return Run(seconds, after.num_preemptions - before.num_preemptions, after.num_swaps - before.num_swaps)

    def prefill_speed(self) -> PrefillSpeed:
        speed = self.engine.scheduler.times.prefill_speed
        assert speed is not None
        return speed

    def _request(self, name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
        prompt = [self._rng.randrange(100, _VOCABULARY) for _ in range(num_prompt_tokens)]
        return Request(
            request_id=RequestId(name), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)
        )


def finish(engine: Engine, requests: Sequence[Request]) -> float:
    """Submit them, step until all have ended; the seconds that took."""
    started_s = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


def by_length(lab: PreemptionLab, num_rounds: int) -> list[str]:
    """What the cost function says, on what was measured a moment ago."""
    computed: dict[int, float] = {}
    for _ in range(num_rounds):
        for length in _LENGTHS:
            computed[length] = min(computed.get(length, 1e9), lab.compute_s(length))
    copy_s = {bandwidth: lab.copy_s_per_block(bandwidth) for bandwidth in _BANDWIDTHS}
    speed, size = lab.prefill_speed(), lab.kv_cache.layout.bytes_per_block
    lines = [
        "| context | computed again | thought to be | copied both ways | " + " | ".join(map(_name, _BANDWIDTHS[1:]))
    ]
    lines[0] += " | computing wins below |"
    lines.append("|" + "---:|" * (5 + len(_BANDWIDTHS) - 1))
    for length in _LENGTHS:
        num_blocks = -(-length // _BLOCK_SIZE)
        loss = Loss(
            num_tokens=length, num_kept_tokens=0, num_stored_tokens=0,
            num_own_blocks=num_blocks, num_freed_blocks=num_blocks, block_size=_BLOCK_SIZE,
        )  # fmt: skip
        cells = []
        for bandwidth in _BANDWIDTHS:
            way = choose_way(loss, Rates(prefill=speed, copy_s_per_block=copy_s[bandwidth]), num_blocks).way
            cells.append(f"{2 * num_blocks * copy_s[bandwidth]:.3f} s: {way.value}")
        crossover = 2 * num_blocks * size / computed[length]
        thought = f"{speed.seconds(0, length):.3f} s"
        lines.append(
            f"| {length} | {computed[length]:.3f} s | {thought} | {' | '.join(cells)} | {crossover / 1e6:.0f} MB/s |"
        )
    return lines


def under_pressure(lab: PreemptionLab, quiet: Quiet, num_rounds: int, num_requests: int, num_tokens: int) -> list[str]:
    runs: dict[tuple[float | None, str], list[Run]] = {}
    for _ in range(num_rounds):
        for bandwidth in _PRESSED:
            quiet.look()
            for rule in RULES:
                runs.setdefault((bandwidth, rule), []).append(
                    lab.under_pressure(rule, bandwidth, num_requests, num_tokens)
                )
    lines = ["| way to the host | recompute | swap | choosing | preempted (swapped) | to recompute | to swap |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    total = dict.fromkeys(RULES, 0.0)
    for bandwidth in _PRESSED:
        best = {rule: min(runs[bandwidth, rule], key=lambda run: run.seconds) for rule in RULES}
        for rule in RULES:
            total[rule] += best[rule].seconds
        chosen = best["choosing"]
        lines.append(_row(_name(bandwidth), {rule: run.seconds for rule, run in best.items()},
                          f"{chosen.num_preemptions} ({chosen.num_swaps})"))  # fmt: skip
    lines.append(_row("all of them", total, ""))
    alike = [min(run.seconds for run in runs[bandwidth, "recompute"]) for bandwidth in _PRESSED]
    spread = f"{max(alike) / min(alike) - 1:.1%}"
    return [
        *lines,
        "",
        "Computing again has nothing to do with the way to the host: its times differ by chance, here by",
        f"{spread}. A choice that differs from the better of both by less says nothing.",
    ]


def _row(name: str, seconds: dict[str, float], counts: str) -> str:
    chosen = seconds["choosing"]
    ratios = " | ".join(f"{chosen / seconds[rule]:.2f}" for rule in ("recompute", "swap"))
    return f"| {name} | " + " | ".join(f"{seconds[rule]:.2f} s" for rule in RULES) + f" | {counts} | {ratios} |"


def _name(bandwidth: float | None) -> str:
    return "a copy in memory" if bandwidth is None else f"{bandwidth / 1e6:.0f} MB/s"


def main(argv: list[str]) -> int:
    description = (__doc__ or "").partition("\n")[2].strip()
    parser = argparse.ArgumentParser(prog="kvasir bench preemption", description=description)
    parser.add_argument("--requests", type=int, default=12, help="at once, under pressure (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=112, help="generated for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    quiet = Quiet()
    lab = PreemptionLab(prepare_builtin_model())
    lab.compute_s(300)  # whatever is done once is done
    lengths = by_length(lab, 1 + options.rounds)
    pressed = under_pressure(lab, quiet, options.rounds, options.requests, options.tokens)
    about = machine() | {"busy_with_other_things": str(quiet)}
    block_bytes = lab.kv_cache.layout.bytes_per_block
    text = [
        "# Out of blocks: compute again, or keep on the host?",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"smollm2-135m-instruct in fp32; a block of {_BLOCK_SIZE} tokens has {block_bytes:,} bytes. What the cost",
        "function chooses for a context of which nothing is cached, from the rates of this run. The cells are the time",
        "of both copies; 'thought to be' is the line that the engine has put through its own steps.",
        "",
        *lengths,
        "",
        f"Under pressure: {options.requests} requests at once, prompts of 64 to 192 tokens, {options.tokens} generated",
        f"for each, {_NUM_BLOCKS_PRESSED} blocks. Seconds until the last token; in the last two columns, choosing as a",
        "share of either.",
        "",
        *pressed,
        "",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "preemption.md").write_text("\n".join(text))
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
