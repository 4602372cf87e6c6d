# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""qk_norm on a GPU: queries and keys of a token are normalised where they lie, in one launch.

qkv of a token   | q0 | q1 | q2 | q3 | k0 | k1 | v0 | v1 |
a program's rows | ROWS heads | ...  | ... |     values are left alone
"""

import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton.casts import rounded

# Shapes: T tokens  H query heads  K KV heads  D head dim

_VALUES_A_PROGRAM = 1024  # 8 values a thread: one load of 16 bytes for 16-bit values


def qk_norm(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    """As in `kvasir.kernels.qk_norm`; rows of qkv may lie apart."""
    head_dim = len(query_weight)
    assert qkv.stride(1) == query_weight.stride(0) == key_weight.stride(0) == 1
    assert qkv.shape[1] >= (num_heads + num_kv_heads) * head_dim
    assert len(key_weight) == head_dim
    block_size = triton.next_power_of_2(head_dim)
    rows = max(_VALUES_A_PROGRAM // block_size, 1)
    _qk_norm_kernel[(len(qkv), triton.cdiv(num_heads + num_kv_heads, rows))](
        qkv, query_weight, key_weight, qkv.stride(0), num_heads, num_heads + num_kv_heads, head_dim, eps,
        ROWS=rows, BLOCK_D=block_size, num_warps=4,
    )  # fmt: skip


@triton.jit
def _qk_norm_kernel(
    qkv_ptr, query_weight_ptr, key_weight_ptr, token_stride, num_heads, num_rows, head_dim, eps,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    dims = tl.arange(0, BLOCK_D)[None, :]  # [1, D]
    mask = (heads < num_rows) & (dims < head_dim)
    ptrs = qkv_ptr + token * token_stride + heads * head_dim + dims
    dtype = qkv_ptr.dtype.element_ty
    values = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    normalised = values * tl.rsqrt(tl.sum(values * values, axis=1) / head_dim + eps)[:, None]
    query_weight = tl.load(query_weight_ptr + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    weight = tl.where(heads < num_heads, query_weight, key_weight)
    tl.store(ptrs, rounded(rounded(normalised, dtype).to(tl.float32) * weight, dtype), mask=mask)
