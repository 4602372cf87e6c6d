"""What a world computes with: a model that checks each plan, memory to swap to, a clock that its readers move."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.engine.blocks import BlockId
from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import Sampled, StepPlan
from kvasir.engine.swap_space import HostBlock
from tests.unit.engine.sampling_runner import SamplingRunner


class CheckingRunner(SamplingRunner):
    """Also checks that no plan breaks a limit, and that nobody writes what another may read."""

    scheduler: Scheduler
    breaks_after: dict[RequestId, int | None]

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        limits, tables = self.scheduler.limits, self.scheduler.tables
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len({chunk.request.request_id for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            assert chunk.request.phase is Phase.RUNNING
            first, last = chunk.start // limits.block_size, (chunk.end - 1) // limits.block_size
            for block in chunk.request.block_table[first : last + 1]:
                assert tables.pool.ref_count(block) == 1, f"block {block} is written while others hold it"
                assert not tables.cache.is_registered(block), f"block {block} is written while it can be found"
        return super().execute(plan)

    def logits(self, digest: int, request: Request, num_drafts: int) -> Tensor:
        logits, breaks_after = super().logits(digest, request, num_drafts), self.breaks_after[request.request_id]
        is_broken = breaks_after is not None and len(request.output_token_ids) + num_drafts >= breaks_after
        return torch.full_like(logits, torch.nan) if is_broken else logits


class Host:
    """Memory for preempted requests."""

    def __init__(self, kv: NDArray[np.int64]) -> None:
        self._kv = kv
        self._saved: dict[HostBlock, NDArray[np.int64]] = {}

    def save(self, block: BlockId, place: HostBlock) -> None:
        self._saved[place] = self._kv[block].copy()

    def load(self, place: HostBlock, block: BlockId) -> None:
        self._kv[block] = self._saved[place]


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by so much each time it is read."""
    times = iter(range(10**9))
    return lambda: step_s * next(times)
