"""Cases of the kernels beside attention: part of `kernel_cases`."""

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from kvasir.bench.lab.kernel_case import HEAD_DIM, HEADS, KV_HEADS, Case, Prepared, close_to
from kvasir.kernels.gelu_mul import gelu_mul, gelu_mul_reference
from kvasir.kernels.pack_blocks import (
    Codec,
    pack_blocks,
    pack_blocks_reference,
    payload_bytes,
    unpack_blocks,
    unpack_blocks_reference,
)
from kvasir.kernels.qk_norm import qk_norm, qk_norm_reference
from kvasir.kernels.quantized_linear import quantize_weight, quantized_linear, quantized_linear_reference
from kvasir.kernels.rms_norm import rms_norm, rms_norm_reference
from kvasir.kernels.sample import SamplingTensors, sample, sample_reference
from kvasir.kernels.silu_mul import silu_mul, silu_mul_reference

# Shapes: T tokens  I inputs  O outputs  P blocks  R rows  V vocabulary

EPS = 1e-5
BLOCK_SHAPE = (32, 2, 8, 16, 128)  # of an 8B model: 2 MiB in bfloat16


def rms_norm_case(num_tokens: int, size: int, device: str) -> Prepared:
    hidden, residual = torch.randn(2, num_tokens, size, device=device).bfloat16()
    weight = torch.randn(size, device=device).bfloat16()
    expected = rms_norm_reference(hidden, weight, EPS, residual.clone())
    first: list[Tensor] = []

    def run() -> Tensor:
        out = rms_norm(hidden, weight, EPS, residual)
        first.append(out) if not first else None
        return out

    return Prepared(run=run, check=lambda: close_to(first[0], expected), amount=4 * hidden.nbytes)


def gated_case(name: str, num_tokens: int, size: int, device: str) -> Prepared:
    kernel, reference = {"silu_mul": (silu_mul, silu_mul_reference), "gelu_mul": (gelu_mul, gelu_mul_reference)}[name]
    gate_up = torch.randn(num_tokens, 2 * size, device=device).bfloat16()
    return Prepared(
        run=lambda: kernel(gate_up),
        check=lambda: close_to(kernel(gate_up), reference(gate_up)),
        amount=1.5 * gate_up.nbytes,
    )


def qk_norm_case(num_tokens: int, device: str) -> Prepared:
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device).bfloat16()
    weight = torch.ones(HEAD_DIM, device=device).bfloat16()
    expected = qkv.clone()

    def check() -> None:
        qk_norm_reference(expected, weight, weight, HEADS, KV_HEADS, EPS)
        close_to(qkv, expected)

    amount = 2 * num_tokens * (HEADS + KV_HEADS) * HEAD_DIM * 2
    return Prepared(run=lambda: qk_norm(qkv, weight, weight, HEADS, KV_HEADS, EPS), check=check, amount=amount)


def packing_case(codec: Codec, unpacks: bool, num_blocks: int, shape: tuple[int, ...], device: str) -> Prepared:
    """Every second block of the cache, in no order."""
    kv_cache = torch.empty((2 * num_blocks, *shape), dtype=torch.bfloat16, device=device).normal_()
    blocks = torch.randperm(2 * num_blocks, device=device)[:num_blocks]
    size = payload_bytes(kv_cache, codec)
    staging = torch.zeros(num_blocks, -(-size // 32) * 32, dtype=torch.uint8, device=device)[:, :size]
    few = slice(min(num_blocks, 4))
    pack_blocks_reference(kv_cache, blocks[few], staging[few], codec=codec)
    expected = kv_cache[blocks[few]]
    unpack_blocks_reference(staging[few], torch.arange(len(expected), device=device), expected, codec=codec)
    payloads = staging[few].clone()
    if not unpacks:
        staging.fill_(0xA5)

    def check() -> None:
        if unpacks:
            assert torch.equal(kv_cache[blocks[few]], expected)
        else:
            assert torch.equal(staging[few], payloads)

    def run() -> None:
        if unpacks:
            unpack_blocks(staging, blocks, kv_cache, codec=codec)
        else:
            pack_blocks(kv_cache, blocks, staging, codec=codec)

    return Prepared(run=run, check=check, amount=num_blocks * (size + kv_cache[0].nbytes))


def sample_case(num_rows: int, vocabulary: int, device: str, **params: float) -> Prepared:
    logits = torch.randn(num_rows, vocabulary, device=device) * 3

    def all_rows(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    tensors = SamplingTensors(
        temperature=all_rows(params.get("temperature", 0.0), torch.float32),
        seeds=torch.arange(num_rows, device=device),
        positions=all_rows(100, torch.int64),
        top_k=all_rows(params.get("top_k", 0), torch.int32),
        top_p=all_rows(params.get("top_p", 1.0), torch.float32),
        min_p=all_rows(0.0, torch.float32),
    )

    def check() -> None:
        # The same but where a number falls beside the border of two tokens.
        same = sample(logits, tensors) == sample_reference(logits, tensors)
        assert int(same.sum()) >= num_rows - 1

    return Prepared(run=lambda: sample(logits, tensors), check=check, amount=logits.nbytes)


def linear_case(weight_dtype: torch.dtype, group_size: int | None, num_tokens: int, device: str) -> Prepared:
    """[T, 4096] by [14336, 4096]; few tokens are held against reading the weight, many against the matmul"""
    weight, scales = quantize_weight(torch.randn(14_336, 4096, device=device) / 64, weight_dtype, group_size)
    x = torch.randn(num_tokens, 4096, device=device).bfloat16()
    num_bytes = weight.nbytes + scales.nbytes + x.nbytes + num_tokens * 14_336 * 2
    return Prepared(
        run=lambda: quantized_linear(x, weight, scales),
        check=lambda: close_to(quantized_linear(x, weight, scales), quantized_linear_reference(x, weight, scales)),
        amount=num_bytes if num_tokens <= 64 else 2.0 * num_tokens * weight.numel(),
    )


def _packings() -> Iterator[Case]:
    for codec in get_args(Codec):
        for kernel, unpacks in (("pack_blocks", False), ("unpack_blocks", True)):
            make = partial(packing_case, codec, unpacks, 512, BLOCK_SHAPE)
            yield Case(kernel=kernel, shape=f"512 x 2 MiB, {codec}", wanted=0.9, make=make)


def _sampling(num_rows: int, shape: str, **params: float) -> Case:
    def make(device: str) -> Prepared:
        return sample_case(num_rows, 128_256, device, **params)

    return Case(kernel="sample", shape=f"{num_rows} x 128256, {shape}", make=make)


def _linear(name: str, dtype: torch.dtype, group_size: int | None, num_tokens: int) -> Case:
    is_large = num_tokens == 4096
    return Case(
        kernel="quantized_linear",
        shape=f"{name}, {'4k' if is_large else num_tokens} x 4096 x 14336",
        bound="matmul" if is_large else "copy",
        make=partial(linear_case, dtype, group_size, num_tokens),
    )


def row_cases() -> list[Case]:
    def gated(name: str) -> Case:
        return Case(kernel=name, shape="8k x 14336", wanted=0.85, make=partial(gated_case, name, 8192, 14_336))

    norm, qk = partial(rms_norm_case, 32_768, 4096), partial(qk_norm_case, 32_768)
    return [
        Case(kernel="rms_norm", shape="32k x 4096, residual", wanted=0.85, make=norm),
        gated("silu_mul"),
        gated("gelu_mul"),
        Case(kernel="qk_norm", shape="32k x 40 x 128", wanted=0.85, make=qk),
        *_packings(),
        _sampling(32, "greedy"),
        _sampling(32, "top-p 0.95", temperature=1.0, top_p=0.95),
        _sampling(256, "top-k 50, top-p 0.95", temperature=1.0, top_k=50, top_p=0.95),
        _linear("int8", torch.int8, None, 32),
        _linear("int8 / 128", torch.int8, 128, 32),
        _linear("fp8", torch.float8_e4m3fn, None, 32),
        _linear("int8", torch.int8, None, 4096),
        _linear("fp8", torch.float8_e4m3fn, None, 4096),
    ]
