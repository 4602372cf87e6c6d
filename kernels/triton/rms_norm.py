# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""rms_norm on a GPU: memory is read once and written once.

program 0   | row 0 ........................ |     one row a program, or several where rows are short;
program 1   | row 1 ........................ |     a program keeps its rows in registers between sum and product
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton.casts import rounded

# Shapes: T tokens  C hidden size

_VALUES_A_PROGRAM = 2048  # at least: short rows are taken together
_VALUES_A_WARP = 512  # 16 a thread: two loads of 16 bytes for 16-bit values
_MAX_WARPS = 16


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """As in `kvasir.kernels.rms_norm`; rows of hidden and residual may lie apart, values of a row may not."""
    num_tokens, size = hidden.shape
    assert weight.shape == (size,), f"{tuple(weight.shape)} weights for rows of {size}"
    assert hidden.stride(1) == weight.stride(0) == 1, "the kernel reads rows of C"
    assert residual is None or (residual.shape == hidden.shape and residual.dtype == hidden.dtype)
    assert residual is None or residual.stride(1) == 1
    out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    block_size = triton.next_power_of_2(size)
    rows = max(_VALUES_A_PROGRAM // block_size, 1)
    _rms_norm_kernel[(triton.cdiv(num_tokens, rows),)](
        hidden, hidden if residual is None else residual, weight, out,
        num_tokens, size, hidden.stride(0), 0 if residual is None else residual.stride(0), eps,
        HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK_C=block_size,
        num_warps=min(max(rows * block_size // _VALUES_A_WARP, 1), _MAX_WARPS),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, size, hidden_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_C)[None, :]  # [1, C]
    mask = (rows < num_rows) & (columns < size)
    values = tl.load(hidden_ptr + rows * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows * residual_stride + columns
        values += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        values = rounded(values, dtype)  # what later layers add to is what is normalised here
        tl.store(residual_ptrs, values, mask=mask)
        values = values.to(tl.float32)
    normalised = values * tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)[:, None]
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    # Rounded before the product with the weight, as the models were trained.
    out = rounded(normalised, dtype).to(tl.float32) * weight
    tl.store(out_ptr + rows * size + columns, rounded(out, dtype), mask=mask)
