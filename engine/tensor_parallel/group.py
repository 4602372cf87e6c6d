"""The ranks that compute one model together: each has a share of every layer's heads and of its inner features.

    x [T, C] --- q, k, v (own heads) --- attention --- output (own inputs) ---+--- sum over the ranks --- [T, C]
    x [T, C] --- gate, up (own features) --- silu --- down (own inputs) ------+--- sum over the ranks --- [T, C]

Norms, embedding and head are whole on each rank, so every rank sees the same hidden states. (Megatron-LM, 2019)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.quantized import GroupedWeight

Weight = Tensor | GroupedWeight


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place. With one rank, everything is whole and nothing is summed."""

    rank: int = 0
    size: int = 1

    def share_of(self, count: int) -> slice:
        """8 heads, rank 1 of 2 -> 4 .. 8"""
        assert count % self.size == 0, f"{count} cannot be shared among {self.size}"
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def own_outputs(self, weight: Weight) -> Weight:
        """weight [O, ...] -> [O / size, ...]"""
        return weight if self.size == 1 else weight[self.share_of(weight.shape[0])]

    def own_inputs(self, weight: Weight) -> Weight:
        """weight [O, I] -> [O, I / size]; packed groups of inputs might be cut in two, so they are unpacked"""
        if self.size == 1:
            return weight
        whole = weight.dequantized() if isinstance(weight, GroupedWeight) else weight
        return whole[:, self.share_of(whole.shape[1])].contiguous()

    def sum(self, partial: Tensor) -> Tensor:
        """Over all ranks, in place. Each rank gets the very same sum."""
        if self.size > 1:
            torch.distributed.all_reduce(partial)
        return partial

    def meet(self, device: torch.device) -> None:
        """On GPUs: nothing that a rank launches behind this begins before all ranks have come here."""
        if self.size > 1 and device.type == "cuda":
            torch.distributed.all_reduce(torch.zeros(1, device=device))


ALONE = Group()
_group: ContextVar[Group] = ContextVar("group", default=ALONE)


def current_group() -> Group:
    """Of the layers that are made now; they keep it."""
    return _group.get()


@contextmanager
def within(group: Group) -> Iterator[None]:
    """Layers made within belong to `group`."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def device_of_rank(first: torch.device, rank: int) -> torch.device:
    """Ranks have neighbouring GPUs, from the first rank's on; CPUs are shared."""
    return first if first.type != "cuda" else torch.device(first.type, (first.index or 0) + rank)


def check_devices(first: torch.device, size: int) -> None:
    """Raises UnsupportedModel where there are fewer GPUs than ranks."""
    if first.type not in ("cpu", "cuda"):
        raise UnsupportedModel(f"tensor_parallel_size {size} works on CPUs and CUDA GPUs, not on {first}")
    if first.type == "cuda" and (first.index or 0) + size > torch.cuda.device_count():
        raise UnsupportedModel(
            f"tensor_parallel_size {size} wants {size} GPUs, from {device_of_rank(first, 0)} on; "
            f"this machine has {torch.cuda.device_count()}"
        )


def check_shares(config: ModelConfig, size: int) -> None:
    """Raises UnsupportedModel where the model cannot be cut into so many equal parts."""
    counts = {"attention heads": config.num_heads, "KV heads": config.num_kv_heads}
    counts["intermediate features"] = config.intermediate_size
    if config.experts is not None:
        counts["intermediate features of an expert"] = config.experts.intermediate_size
    for what, count in counts.items():
        if count % size:
            raise UnsupportedModel(f"tensor_parallel_size {size} does not divide the {count} {what} of this model")
