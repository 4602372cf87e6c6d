# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""quantized_linear on a GPU: weights cross the memory bus in 8 bits and become 16 where they are multiplied.

                 weight [O, I]
                 I --->
    x [T, I]   O | BLOCK_O x BLOCK_I at a time |      a program: BLOCK_T tokens by BLOCK_O outputs, all I inputs
      I --->     v
    T | BLOCK_T x BLOCK_I |   --->   out [T, O]

Every int8 and every e4m3 value is exact in float16 and in bfloat16, so a tile is multiplied as it is, and scales
come after: once at the end, or, where groups of inputs have their own, with each group's sum.

Few tokens are a matter of reading the weight, and want many loads under way; many tokens, of the tensor cores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton.casts import e4m3_values, rounded
from kvasir.kernels.triton.device import dot_type

# Shapes: T tokens  I inputs  O outputs  G groups of inputs

_FEW_TOKENS = 64


def quantized_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """As in `kvasir.kernels.quantized_linear`; rows of x may lie apart. Groups are of a multiple of 16 inputs."""
    num_tokens, num_inputs = x.shape
    num_outputs, num_groups = scales.shape
    group_size = num_inputs // num_groups
    assert x.stride(1) == 1, "the kernel reads rows of I"
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert num_groups == 1 or group_size % 16 == 0, f"groups of {group_size}: a tile would cross their borders"
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    block_t, block_o, block_i, num_warps, num_stages = _tiling(num_tokens, x.dtype)
    block_t = min(block_t, max(triton.next_power_of_2(num_tokens), 16))
    block_i = min(block_i, max(triton.next_power_of_2(num_inputs), 16))
    if num_groups > 1:
        block_i = min(block_i, group_size & -group_size)  # the largest power of two that divides a group
    _linear_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(num_outputs, block_o))](
        x, weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight, scales,
        scales if bias is None else bias, out, num_tokens, num_inputs, num_outputs, x.stride(0), group_size, num_groups,
        DOT_TYPE=dot_type(x), IS_FP8=weight.dtype == torch.float8_e4m3fn, IS_GROUPED=num_groups > 1,
        HAS_BIAS=bias is not None, BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=block_i,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def _tiling(num_tokens: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Tokens at most, outputs, inputs, warps, stages: no register spills. float32 is for the cores without tensors."""
    if dtype == torch.float32:
        return (64, 32, 32, 4, 4) if num_tokens <= _FEW_TOKENS else (64, 64, 16, 8, 3)
    return (64, 32, 256, 4, 4) if num_tokens <= _FEW_TOKENS else (128, 128, 64, 8, 3)


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, num_tokens, num_inputs, num_outputs, x_stride, group_size,
    num_groups, DOT_TYPE: tl.constexpr, IS_FP8: tl.constexpr, IS_GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    # Programs that start together read the same rows of the weight: the second finds them in the cache.
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [T, 1]
    outputs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)  # [O]
    inputs = tl.arange(0, BLOCK_I)[None, :]  # [1, I]
    x_ptrs = x_ptr + tokens.to(tl.int64) * x_stride + inputs
    weight_ptrs = weight_ptr + outputs[:, None].to(tl.int64) * num_inputs + inputs
    is_output = outputs < num_outputs
    sums = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for start in range(0, num_inputs, BLOCK_I):
        is_input = inputs < num_inputs - start
        x = tl.load(x_ptrs + start, mask=(tokens < num_tokens) & is_input, other=0.0).to(tl.float32).to(DOT_TYPE)
        weight = tl.load(weight_ptrs + start, mask=is_output[:, None] & is_input, other=0)
        if IS_FP8:
            weight = e4m3_values(weight)
        product = tl.dot(x, tl.trans(weight.to(tl.float32).to(DOT_TYPE)), input_precision="ieee")
        if IS_GROUPED:
            group = start // group_size
            scale = tl.load(scales_ptr + outputs.to(tl.int64) * num_groups + group, mask=is_output, other=0.0)
            product *= scale.to(tl.float32)[None, :]
        sums += product
    if not IS_GROUPED:
        sums *= tl.load(scales_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + tokens.to(tl.int64) * num_outputs + outputs[None, :]
    out = rounded(sums, out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=(tokens < num_tokens) & is_output[None, :])
