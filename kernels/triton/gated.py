# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""silu_mul and gelu_mul on a GPU: both are gate * sigmoid(f(gate)) * up, in one pass over memory.

silu             f(x) = x
gelu, by tanh    f(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3)         since 1/2 (1 + tanh(z)) = sigmoid(2 z)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton.casts import rounded

# Shapes: T tokens  I intermediate size

_BLOCK_I = 1024  # 8 values a thread: one load of 16 bytes for 16-bit values


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 I]: gate, then up -> activation(gate) * up [T, I]; `silu` or `gelu`. Rows may lie apart."""
    assert gate_up.stride(1) == 1, "the kernel reads rows of 2 I"
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(num_tokens, triton.cdiv(size, _BLOCK_I))](
        gate_up, out, size, gate_up.stride(0), IS_GELU=activation == "gelu", BLOCK_I=_BLOCK_I, num_warps=4
    )
    return out


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, size, row_stride, IS_GELU: tl.constexpr, BLOCK_I: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)  # [I]
    mask = columns < size
    gate_ptrs = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if IS_GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    decay = tl.exp(-tl.abs(inner))  # never overflows
    out = gate * tl.where(inner >= 0, 1.0, decay) / (1.0 + decay) * up
    tl.store(out_ptr + row * size + columns, rounded(out, out_ptr.dtype.element_ty), mask=mask)
