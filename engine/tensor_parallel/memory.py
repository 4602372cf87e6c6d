"""How much memory there is for KV where each rank has a GPU of its own."""

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp, all_reduce

from kvasir.engine.cuda_memory import NoRoomForKV, kv_budget_bytes, profile_memory
from kvasir.engine.forward_pass import Model

if TYPE_CHECKING:
    from kvasir.engine.tensor_parallel.worker import WorkerSettings


def shared_budget_bytes(model: Model, settings: "WorkerSettings", device: torch.device) -> int:
    """Of all ranks together: as many times the least that one has. All call it at the same time, for the largest step
    is run by all of them. Raises NoRoomForKV, on all ranks, if one has none."""
    reason = "another GPU of this node has no room for KV; its log says why"
    try:
        profile = profile_memory(
            model, settings.part, settings.max_model_len, settings.max_num_batched_tokens, settings.max_num_seqs,
            device, settings.num_drafts,
        )  # fmt: skip
        own_bytes = kv_budget_bytes(profile, settings.gpu_memory_utilization)
    except NoRoomForKV as error:
        own_bytes, reason = 0, str(error)
    return settings.size * least_of_all(own_bytes, device, reason)


def least_of_all(own_bytes: int, device: torch.device, reason: str) -> int:
    """The least that a rank brings. Raises NoRoomForKV(reason) where that is nothing."""
    least = torch.tensor([own_bytes], device=device)
    all_reduce(least, ReduceOp.MIN)
    if (found := int(least)) == 0:
        raise NoRoomForKV(reason)
    return found
