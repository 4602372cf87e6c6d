# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Attention of the newest tokens of each sequence: the contexts are cut in pieces, and the pieces' sums are joined.

One sequence may have a hundred times the context of another, and only the GPU knows: the lengths change with each
step, while a CUDA graph replays one grid. So the grid has a fixed number of programs, TARGET + S for each KV head.
Each counts the tiles of all sequences, cuts them in pieces of one size, about TARGET pieces in all, and finds its own
by a prefix sum:

    tiles    9, 2, 0, 5     TARGET 4     pieces of ceil(16 / 4) = 4 tiles
    pieces   4 4 1 | 2 | | 4 1           each sequence ends with a shorter piece: at most TARGET + S

A piece leaves its unfinished softmax (acc, top, total); a second kernel joins a sequence's pieces. After
flash-decoding (Dao et al. 2023) and the load-balanced schedule of FlashInfer (Ye et al. 2025).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton import device
from kvasir.kernels.triton.casts import rounded
from kvasir.kernels.triton.paged_tiles import attend, locate

# Shapes: S sequences  Q tokens of each  M blocks of the longest sequence  N blocks  L layers  B tokens a block
#   H query heads  K KV heads  G = H / K  D head dim  P pieces at most = TARGET + S

TILE_BYTES = 16_384  # of keys, and as much of values
PIECES_PER_PROCESSOR = 8  # small enough that the last ones to finish leave no large gap
MAX_ROWS = 64


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """query [S Q, >= H D] -> out [S Q, H D], both with any stride between tokens; the cache is contiguous"""
    num_sequences = len(seq_lens)
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens, group = len(query) // num_sequences, out.shape[1] // head_dim // num_kv_heads
    assert query.dtype == kv_cache.dtype == out.dtype
    assert query.stride(1) == 1
    assert out.stride(1) == 1
    assert kv_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    padded = max(16, triton.next_power_of_2(head_dim))
    # float32 has no tensor cores: a product takes so many registers that more threads share smaller tiles.
    is_float32 = query.dtype == torch.float32
    tile_bytes, max_rows, num_warps = (TILE_BYTES // 2, 16, 8) if is_float32 else (TILE_BYTES, MAX_ROWS, 4)
    tile = min(128, max(16, tile_bytes // padded // kv_cache.element_size()))
    rows = min(max_rows, max(16, triton.next_power_of_2(num_tokens * group)))
    target = triton.cdiv(device.num_processors(query) * PIECES_PER_PROCESSOR, num_kv_heads)
    max_pieces = target + num_sequences
    sums = query.new_empty(max_pieces, num_kv_heads, num_tokens * group, head_dim, dtype=torch.float32)
    tops, totals = query.new_empty(2, max_pieces, num_kv_heads, num_tokens * group, dtype=torch.float32)
    schedule = {"TARGET": target, "WINDOW": window, "Q": num_tokens, "TILE": tile, "K": num_kv_heads, "G": group,
                "D": head_dim, "D_PAD": padded, "S_PAD": triton.next_power_of_2(num_sequences)}  # fmt: skip
    _piece_kernel[num_kv_heads, max_pieces, triton.cdiv(num_tokens * group, rows)](
        query, kv_cache[:, layer], block_tables, seq_lens, sums, tops, totals,
        query.stride(0), kv_cache.stride(0), block_tables.stride(0), num_sequences, scale,
        # Of five stages, one reads block numbers, two read keys and values, and two compute.
        SOFTCAP=softcap, B=block_size, ROWS=rows, DOT=device.dot_type(kv_cache), **schedule,
        num_warps=num_warps, num_stages=5,
    )  # fmt: skip
    _join_kernel[num_sequences * num_tokens, num_kv_heads * group](
        sums, tops, totals, seq_lens, out, out.stride(0), num_sequences, PIECES=16, **schedule, num_warps=4
    )


@triton.jit
def _first_key(seq_len, WINDOW: tl.constexpr, Q: tl.constexpr):
    """The first that the first of the Q new tokens sees, and so any of them."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - Q + 1 - WINDOW, 0)
    return first_key


@triton.jit
def _cut(seq_lens_ptr, num_sequences, TARGET: tl.constexpr, WINDOW: tl.constexpr, Q: tl.constexpr, TILE: tl.constexpr,
         S_PAD: tl.constexpr):  # fmt: skip
    """-> pieces of each sequence [S_PAD], tiles of a whole piece"""
    s = tl.arange(0, S_PAD)
    lengths = tl.load(seq_lens_ptr + s, mask=s < num_sequences, other=0)
    tiles = tl.cdiv(lengths, TILE) - _first_key(lengths, WINDOW, Q) // TILE
    piece_tiles = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), TARGET), 1)
    return tl.cdiv(tiles, piece_tiles), piece_tiles


@triton.jit(**device.FEW_VARIANTS)
def _piece_kernel(
    query_ptr, layer_cache_ptr, block_tables_ptr, seq_lens_ptr, sums_ptr, tops_ptr, totals_ptr,
    query_stride, block_stride, table_stride, num_sequences, scale,
    SOFTCAP: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
    TARGET: tl.constexpr, WINDOW: tl.constexpr, Q: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    # Heads first: neighbours in the grid read neighbouring heads of the same blocks.
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    pieces, piece_tiles = _cut(seq_lens_ptr, num_sequences, TARGET, WINDOW, Q, TILE, S_PAD)
    sequence, piece_in_sequence = locate(pieces, piece)
    if sequence >= num_sequences:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_key = _first_key(seq_len, WINDOW, Q)
    first_tile = first_key // TILE + piece_in_sequence * piece_tiles
    last_tile = tl.minimum(first_tile + piece_tiles, tl.cdiv(seq_len, TILE))

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token = row // G
    d = tl.arange(0, D_PAD)[None, :]
    mask = (row < Q * G)[:, None] & (d < D)
    row_tokens = (sequence * Q + token).to(tl.int64)[:, None]
    q = tl.load(query_ptr + row_tokens * query_stride + (kv_head * G + row % G)[:, None] * D + d, mask=mask, other=0.0)
    acc, top, total = attend(
        q.to(DOT), seq_len - Q + token, seq_len - Q, seq_len - 1, first_key,
        layer_cache_ptr + kv_head * B * D, block_tables_ptr + sequence.to(tl.int64) * table_stride, block_stride,
        K * B * D, first_tile, last_tile, scale, SOFTCAP, WINDOW, B, D, TILE, DOT,
    )  # fmt: skip
    place = (piece * K + kv_head).to(tl.int64) * (Q * G) + row
    tl.store(sums_ptr + place[:, None] * D + d, acc, mask=mask)
    tl.store(tops_ptr + place, top, mask=row < Q * G)
    tl.store(totals_ptr + place, total, mask=row < Q * G)


@triton.jit(**device.FEW_VARIANTS)
def _join_kernel(
    sums_ptr, tops_ptr, totals_ptr, seq_lens_ptr, out_ptr, out_stride, num_sequences, PIECES: tl.constexpr,
    TARGET: tl.constexpr, WINDOW: tl.constexpr, Q: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    """One token and head: PIECES pieces at a time, with a running softmax as over tiles. No piece, no context: 0."""
    token, head = tl.program_id(0), tl.program_id(1)
    sequence = token // Q
    pieces, _ = _cut(seq_lens_ptr, num_sequences, TARGET, WINDOW, Q, TILE, S_PAD)
    s = tl.arange(0, S_PAD)
    first_piece = tl.sum(tl.where(s < sequence, pieces, 0), axis=0)
    num_pieces = tl.sum(tl.where(s == sequence, pieces, 0), axis=0)

    row = (token % Q) * G + head % G
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    top, total = float("-inf"), 0.0
    for first in range(0, num_pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        exists = piece < num_pieces
        place = ((first_piece + piece) * K + head // G).to(tl.int64) * (Q * G) + row
        piece_tops = tl.load(tops_ptr + place, mask=exists, other=float("-inf"))
        piece_totals = tl.load(totals_ptr + place, mask=exists, other=0.0)
        piece_sums = tl.load(
            sums_ptr + place[:, None] * D + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0
        )
        new_top = tl.maximum(top, tl.max(piece_tops, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, rescale = tl.exp2(piece_tops - shift), tl.exp2(top - shift)
        acc = acc * rescale + tl.sum(piece_sums * weights[:, None], axis=0)
        total = total * rescale + tl.sum(piece_totals * weights, axis=0)
        top = new_top
    attended = acc / tl.where(total == 0, 1.0, total)
    place = token.to(tl.int64) * out_stride + head * D + d
    tl.store(out_ptr + place, rounded(attended, out_ptr.dtype.element_ty), mask=d < D)
