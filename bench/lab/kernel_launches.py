"""One launch of each Triton kernel in the shape of an 8B model, on tensors without memory: what `kernel_code` compiles.

To add a kernel: a function here that calls its launcher, and its name in LAUNCHES.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from kvasir.kernels.pack_blocks import Codec, payload_bytes
from kvasir.kernels.sample import Bias, Penalties, SamplingTensors
from kvasir.kernels.triton.decode_attention import decode_attention
from kvasir.kernels.triton.gated import gated
from kvasir.kernels.triton.pack_blocks import pack_blocks, unpack_blocks
from kvasir.kernels.triton.prefill_attention import prefill_attention
from kvasir.kernels.triton.qk_norm import qk_norm
from kvasir.kernels.triton.quantized_linear import quantized_linear
from kvasir.kernels.triton.rms_norm import rms_norm
from kvasir.kernels.triton.sample import sample
from kvasir.kernels.triton.write_kv import write_kv

NUM_TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 4096, 4096, 14_336, 32, 8
NUM_SEQUENCES, MAX_BLOCKS, NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 32, 8192, 65_536, 32, 16
NUM_ROWS, VOCABULARY = 32, 128_256
BLOCK_SHAPE = (NUM_LAYERS, 2, KV_HEADS, BLOCK_SIZE, 128)

Launch = Callable[[torch.dtype], None]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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


def _rms_norm(dtype: torch.dtype) -> None:
    hidden = empty(NUM_TOKENS, HIDDEN, dtype=dtype)
    rms_norm(hidden, empty(HIDDEN, dtype=dtype), 1e-5, hidden)


def _gated(activation: str) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        gated(empty(NUM_TOKENS, 2 * INTERMEDIATE, dtype=dtype), activation)

    return launch


def _qk_norm(dtype: torch.dtype) -> None:
    weight = empty(128, dtype=dtype)
    qk_norm(empty(NUM_TOKENS, (HEADS + 2 * KV_HEADS) * 128, dtype=dtype), weight, weight, HEADS, KV_HEADS, 1e-6)


def _packing(codec: Codec) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        kv_cache = empty(1024, *BLOCK_SHAPE, dtype=dtype)
        staging = empty(64, payload_bytes(kv_cache, codec), dtype=torch.uint8)
        blocks = empty(64, dtype=torch.int64)
        pack_blocks(kv_cache, blocks, staging, codec, range(KV_HEADS))
        unpack_blocks(staging, blocks, kv_cache, codec, range(KV_HEADS))

    return launch


def _sample(dtype: torch.dtype) -> None:
    floats, ints = empty(NUM_ROWS, dtype=torch.float32), empty(NUM_ROWS, dtype=torch.int64)
    params: dict[str, Any] = {
        "temperature": floats, "seeds": ints, "positions": ints, "top_k": empty(NUM_ROWS, dtype=torch.int32),
        "top_p": floats, "min_p": floats,
    }  # fmt: skip
    logits = empty(NUM_ROWS, VOCABULARY, dtype=dtype)
    sample(logits, SamplingTensors(**params))
    penalties = Penalties(
        repetition=floats, presence=floats, frequency=floats,
        prompt_rows=ints, prompt_ids=ints, output_rows=ints, output_ids=ints,
    )  # fmt: skip
    allowed = empty(NUM_ROWS, VOCABULARY // 32, dtype=torch.int32)
    bias = Bias(rows=ints, ids=ints, values=floats)
    sample(logits, SamplingTensors(**params, bias=bias, penalties=penalties, allowed=allowed))


def _linear(num_tokens: int, weight_dtype: torch.dtype, num_groups: int) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        weight = empty(HIDDEN, HIDDEN, dtype=weight_dtype)
        scales = empty(HIDDEN, num_groups, dtype=torch.float32)
        quantized_linear(empty(num_tokens, HIDDEN, dtype=dtype), weight, scales)

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
    "rms_norm": _rms_norm,
    "silu_mul": _gated("silu"),
    "gelu_mul": _gated("gelu"),
    "qk_norm": _qk_norm,
    **{f"pack and unpack, {codec}": _packing(codec) for codec in get_args(Codec)},
    "sample": _sample,
    "quantized_linear, int8, T 32": _linear(32, torch.int8, 1),
    "quantized_linear, int8 in groups of 128, T 32": _linear(32, torch.int8, HIDDEN // 128),
    "quantized_linear, fp8, T 32": _linear(32, torch.float8_e4m3fn, 1),
    "quantized_linear, int8, T 4096": _linear(NUM_TOKENS, torch.int8, 1),
    "quantized_linear, int8 in groups of 128, T 4096": _linear(NUM_TOKENS, torch.int8, HIDDEN // 128),
    "quantized_linear, fp8, T 4096": _linear(NUM_TOKENS, torch.float8_e4m3fn, 1),
}
