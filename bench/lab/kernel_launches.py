"""One launch of each Triton kernel in the shape of an 8B model, on tensors without memory: what `kernel_code` compiles.

To add a kernel: a function here that calls its launcher, and its name in LAUNCHES.
"""

import torch
from torch import Tensor

from kvasir.bench.lab.kernel_launches_rows import HEADS, KV_HEADS, NUM_TOKENS, ROW_LAUNCHES, Launch, empty
from kvasir.kernels.triton.decode_attention import decode_attention
from kvasir.kernels.triton.prefill_attention import prefill_attention
from kvasir.kernels.triton.write_kv import write_kv

NUM_SEQUENCES, MAX_BLOCKS, NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 32, 8192, 65_536, 32, 16


def _qkv_and_cache(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        empty(num_tokens, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype),
        empty(NUM_BLOCKS, NUM_LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim, dtype=dtype),
    )


def _write_kv(head_dim: int, rotated: int, interleaved: bool = False) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        qkv, kv_cache = _qkv_and_cache(NUM_TOKENS, head_dim, dtype)
        angles = empty(NUM_TOKENS, rotated // 2, dtype=torch.float32)
        slots = empty(NUM_TOKENS, dtype=torch.int64)
        write_kv(qkv, angles, angles, slots, kv_cache, 5, interleaved=interleaved)

    return launch


def _prefill(head_dim: int, window: int = 0, softcap: float = 0.0) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        query, kv_cache = _qkv_and_cache(NUM_TOKENS, head_dim, dtype)
        prefill_attention(
            query, kv_cache, 5, empty(NUM_SEQUENCES, MAX_BLOCKS, dtype=torch.int32),
            empty(NUM_SEQUENCES + 1, dtype=torch.int32), empty(NUM_SEQUENCES, dtype=torch.int32),
            empty(NUM_TOKENS, HEADS * head_dim, dtype=dtype), scale=head_dim**-0.5, window=window, softcap=softcap,
        )  # fmt: skip

    return launch


def _decode(head_dim: int, tokens_each: int = 1, window: int = 0, softcap: float = 0.0) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        query, kv_cache = _qkv_and_cache(NUM_SEQUENCES * tokens_each, head_dim, dtype)
        decode_attention(
            query, kv_cache, 5, empty(NUM_SEQUENCES, MAX_BLOCKS, dtype=torch.int32),
            empty(NUM_SEQUENCES, dtype=torch.int32), empty(len(query), HEADS * head_dim, dtype=dtype),
            scale=head_dim**-0.5, window=window, softcap=softcap,
        )  # fmt: skip

    return launch


LAUNCHES: dict[str, Launch] = {
    "write_kv": _write_kv(128, 128),
    "write_kv, partial": _write_kv(80, 32),
    "write_kv, interleaved": _write_kv(128, 128, interleaved=True),
    "prefill_attention, D 64": _prefill(64),
    "prefill_attention, D 80": _prefill(80),
    "prefill_attention, D 96": _prefill(96),
    "prefill_attention, D 128": _prefill(128),
    "prefill_attention, D 128, window": _prefill(128, window=4096),
    "prefill_attention, D 256, soft cap": _prefill(256, softcap=50.0),
    "decode_attention, D 64": _decode(64),
    "decode_attention, D 80": _decode(80),
    "decode_attention, D 96": _decode(96),
    "decode_attention, D 128": _decode(128),
    "decode_attention, D 128, window": _decode(128, window=4096),
    "decode_attention, D 128, 8 tokens": _decode(128, tokens_each=8),
    "decode_attention, D 256, soft cap": _decode(256, softcap=50.0),
    **ROW_LAUNCHES,
}
