"""A KV block as bytes: what the bytes mean is nobody else's business."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Shapes: N blocks  L layers  K KV heads  B tokens a block  D head dim


def pool_bytes(kv_cache: Tensor) -> memoryview:
    """kv_cache [N, ...], contiguous, on a CPU -> its own memory, all of it, as [N, bytes of a block]."""
    return kv_cache.view(len(kv_cache), -1).view(torch.uint8).numpy().data


def joined_block_bytes(parts: Sequence[Tensor], block: int) -> memoryview:
    """parts [N, L, 2, K / len(parts), B, D] each, on a CPU -> the bytes of one block with all heads, in order."""
    whole = torch.cat([_by_head(part, block) for part in parts], dim=1)
    return whole.view(-1).numpy().data


def write_joined_block_bytes(parts: Sequence[Tensor], block: int, payload: memoryview) -> None:
    """Give each part its heads of one block; `payload` has exactly as many bytes as a block with all of them."""
    places = [_by_head(part, block) for part in parts]
    num_bytes = sum(place.numel() for place in places)
    if payload.nbytes != num_bytes:
        raise ValueError(f"a block has {num_bytes} bytes, the payload {payload.nbytes}")
    pairs, heads, size = places[0].shape
    whole = np.frombuffer(payload, np.uint8).reshape(pairs, heads * len(places), size)
    for rank, place in enumerate(places):
        place.numpy()[:] = whole[:, rank * heads : (rank + 1) * heads]


def _by_head(part: Tensor, block: int) -> Tensor:
    """part [N, L, 2, K, B, D] -> [2 L, K, bytes of a head] of one block, the part's own memory"""
    if not 0 <= block < len(part):
        raise IndexError(f"block {block} of {len(part)}")
    return part[block].flatten(-2).view(torch.uint8).flatten(0, 1)
