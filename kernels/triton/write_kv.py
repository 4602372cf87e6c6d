# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Rotates queries and keys, and writes keys and values to their slots: a program for each token and HEADS heads.

Each head is taken as D / 2 pairs of dimensions, whichever way the rotation pairs them; what is not rotated (values,
and the dimensions from R on) is copied pair by pair. One thread loads both halves of a pair before it stores either,
so rotating in place is safe.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton import device
from kvasir.kernels.triton.casts import rounded

# Shapes: T tokens  N blocks  L layers  B tokens a block  H query heads  K KV heads  D head dim
#   R rotated dimensions of a head
HEADS = 16


def write_kv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    layer: int,
    *,
    interleaved: bool = False,
) -> None:
    """qkv [T, (H + 2 K) D] with any stride between tokens; keys in it stay as they were; the cache is contiguous"""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.dtype == kv_cache.dtype
    assert qkv.stride(1) == 1
    assert kv_cache.is_contiguous()
    assert slots.is_contiguous()
    assert head_dim % 2 == 0
    if cos is None or sin is None:
        rotated = 0
    else:
        rotated = 2 * cos.shape[1]
        assert rotated <= head_dim
        assert cos.is_contiguous()
        assert sin.is_contiguous()
    grid = (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
    if len(qkv) > 0:
        _write_kv_kernel[grid](
            qkv, cos, sin, slots, kv_cache[:, layer], qkv.stride(0), kv_cache.stride(0),
            H=num_heads, K=num_kv_heads, B=block_size, D=head_dim, R=rotated, INTERLEAVED=interleaved,
            HEADS=HEADS, PAIRS=triton.next_power_of_2(head_dim // 2), num_warps=4,
        )  # fmt: skip


@triton.jit(**device.FEW_VARIANTS)
def _write_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, layer_cache_ptr, qkv_stride, block_stride,
    H: tl.constexpr, K: tl.constexpr, B: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # queries, keys, values
    pair = tl.arange(0, PAIRS)[None, :]
    if R == D or R == 0:
        x_dim, y_dim = pair, pair + D // 2
    else:
        # The rotated pairs, then the rest: its first half with its second.
        x_dim = tl.where(pair < R // 2, pair, pair + R // 2)
        y_dim = tl.where(pair < R // 2, pair + R // 2, pair + D // 2)
    row = qkv_ptr + token * qkv_stride + head * D
    x, y = _load_pairs(row, x_dim, y_dim, head < H + 2 * K, D, INTERLEAVED)
    if R > 0:
        c = tl.load(cos_ptr + token * (R // 2) + pair, mask=pair < R // 2, other=1.0)
        s = tl.load(sin_ptr + token * (R // 2) + pair, mask=pair < R // 2, other=0.0)
        a, b = x.to(tl.float32), y.to(tl.float32)
        # Chosen, not multiplied by 1 and 0: a value that is not finite stays what it is, and so does its neighbour.
        rotates = (head < H + K) & (pair < R // 2)
        x = tl.where(rotates, rounded(a * c - b * s, x.dtype), x)
        y = tl.where(rotates, rounded(b * c + a * s, y.dtype), y)
        _store_pairs(row, x_dim, y_dim, x, y, head < H, D, INTERLEAVED)

    slot = tl.load(slots_ptr + token)
    # A cache has more than 2^31 elements: slots are 64 bits, and so is what comes of them. The keys of all heads lie
    # before the values of all heads.
    place = layer_cache_ptr + (slot // B) * block_stride + (head - H) * (B * D) + (slot % B) * D
    _store_pairs(place, x_dim, y_dim, x, y, (head >= H) & (head < H + 2 * K) & (slot >= 0), D, INTERLEAVED)


@triton.jit
def _load_pairs(row, x_dim, y_dim, mask, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """row, mask [HEADS, 1], where a head begins and whether it is read -> both of each pair, [HEADS, PAIRS]"""
    if INTERLEAVED:  # memory is read in order, 16 bytes at a time, and taken apart in registers
        d = tl.arange(0, 2 * x_dim.shape[1])[None, :]
        values = tl.load(row + d, mask=mask & (d < D))
        x, y = tl.split(tl.reshape(values, [row.shape[0], x_dim.shape[1], 2]))
    else:
        mask = mask & (tl.arange(0, x_dim.shape[1])[None, :] < D // 2)
        x, y = tl.load(row + x_dim, mask=mask), tl.load(row + y_dim, mask=mask)
    return x, y


@triton.jit
def _store_pairs(row, x_dim, y_dim, x, y, mask, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The reverse: x, y [HEADS, PAIRS] to where the heads of `mask` [HEADS, 1] begin"""
    if INTERLEAVED:
        d = tl.arange(0, 2 * x.shape[1])[None, :]
        tl.store(row + d, tl.reshape(tl.join(x, y), [x.shape[0], 2 * x.shape[1]]), mask=mask & (d < D))
    else:
        mask = mask & (tl.arange(0, x.shape[1])[None, :] < D // 2)
        tl.store(row + x_dim, x, mask=mask)
        tl.store(row + y_dim, y, mask=mask)
