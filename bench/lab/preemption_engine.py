"""An engine of the built-in model whose way to the host is as slow as one likes, and which obeys a rule."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.bench.lab.engine_runs import new_request, run_to_end
from kvasir.bench.lab.prompts import random_prompt
from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.engine.blocks import BlockId
from kvasir.engine.factory import build_engine
from kvasir.engine.host_blocks import HostBlocks
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.preemption import Choice, Loss, Rates, Way, choose_way
from kvasir.engine.request import Request
from kvasir.engine.settings import EngineSettings
from kvasir.engine.swap_space import HostBlock, SwapSpace

BLOCK_SIZE = 16
NUM_BLOCKS_PRESSED = 80
_NUM_BLOCKS = 130  # of the cache: the longest context, and a few
_NUM_HOST_BLOCKS = 160


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
        one_block = 2 * 30 * 3 * BLOCK_SIZE * 64 * 4
        settings = EngineSettings(model=str(model), kv_cache_memory=_NUM_BLOCKS * one_block, watermark=0.0)
        self.engine, self.kv_cache, _ = build_engine(settings)
        self.host = SlowHost(self.kv_cache, _NUM_HOST_BLOCKS)
        self._rng = random.Random(0)

    def compute_s(self, num_tokens: int) -> float:
        """A prompt of that length, without anything of it cached."""
        return self._finish_s([self._request("r", num_tokens, 1)])

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
        requests = [self._request(i, 64 + 32 * (i % 5), num_tokens) for i in range(num_requests)]
        taken = scheduler.tables.pool.allocate(_NUM_BLOCKS - NUM_BLOCKS_PRESSED)
        assert taken is not None
        seconds = self._finish_s(requests)
        scheduler.tables.pool.release(taken)
        after = engine.stats()
        return Run(seconds, after.num_preemptions - before.num_preemptions, after.num_swaps - before.num_swaps)

    def prefill_speed(self) -> PrefillSpeed:
        speed = self.engine.scheduler.times.prefill_speed
        assert speed is not None
        return speed

    def _request(self, name: object, num_prompt_tokens: int, num_tokens: int) -> Request:
        return new_request(name, random_prompt(self._rng, num_prompt_tokens), num_tokens)

    def _finish_s(self, requests: Sequence[Request]) -> float:
        started_s = time.perf_counter()
        run_to_end(self.engine, requests)
        return time.perf_counter() - started_s
