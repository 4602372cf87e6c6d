"""A KV block as bytes: what the bytes mean is nobody else's business."""

import numpy as np
import torch
from torch import Tensor

# Shapes: N blocks


def block_bytes(kv_cache: Tensor, block: int) -> memoryview:
    """kv_cache [N, ...], contiguous -> the bytes of one block; on a CPU the cache's own memory, without a copy."""
    contents = kv_cache[block].reshape(-1).view(torch.uint8)
    return contents.cpu().numpy().data


def pool_bytes(kv_cache: Tensor) -> memoryview:
    """kv_cache [N, ...], contiguous, on a CPU -> its own memory, all of it, as [N, bytes of a block]."""
    return kv_cache.view(len(kv_cache), -1).view(torch.uint8).numpy().data


def write_block_bytes(kv_cache: Tensor, block: int, payload: memoryview) -> None:
    """Fill one block; `payload` has exactly as many bytes as a block."""
    contents = kv_cache[block].view(-1).view(torch.uint8)
    if payload.nbytes != contents.numel():
        raise ValueError(f"a block has {contents.numel()} bytes, the payload {payload.nbytes}")
    if contents.device.type == "cpu":
        contents.numpy()[:] = np.frombuffer(payload, np.uint8)  # which lets other threads go on
    else:
        contents.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
