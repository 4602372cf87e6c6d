"""Launches of the kernels beside attention, in the shape of an 8B model: part of `kernel_launches`."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from kvasir.kernels.pack_blocks import Codec, payload_bytes
from kvasir.kernels.sample import Bias, Penalties, SamplingTensors
from kvasir.kernels.triton.gated import gated
from kvasir.kernels.triton.pack_blocks import pack_blocks, unpack_blocks
from kvasir.kernels.triton.qk_norm import qk_norm
from kvasir.kernels.triton.quantized_linear import quantized_linear
from kvasir.kernels.triton.rms_norm import rms_norm
from kvasir.kernels.triton.sample import sample

NUM_TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 4096, 4096, 14_336, 32, 8
NUM_ROWS, VOCABULARY = 32, 128_256
BLOCK_SHAPE = (32, 2, KV_HEADS, 16, 128)

Launch = Callable[[torch.dtype], None]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rms_norm(dtype: torch.dtype) -> None:
    hidden = empty(NUM_TOKENS, HIDDEN, dtype=dtype)
    rms_norm(hidden, empty(HIDDEN, dtype=dtype), 1e-5, hidden)


def _silu_mul(dtype: torch.dtype) -> None:
    gated(empty(NUM_TOKENS, 2 * INTERMEDIATE, dtype=dtype), "silu")


def _gelu_mul(dtype: torch.dtype) -> None:
    gated(empty(NUM_TOKENS, 2 * INTERMEDIATE, dtype=dtype), "gelu")


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


ROW_LAUNCHES: dict[str, Launch] = {
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
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
