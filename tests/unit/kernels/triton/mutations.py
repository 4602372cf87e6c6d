"""Mistakes that the tests of a kernel must notice: masks, strides, scales, reductions, 32-bit offsets.

    python -m tests.unit.kernels.triton.mutate                     all of them
    python -m tests.unit.kernels.triton.mutate write_kv:3 ...      some

A mutation replaces a text that occurs once in its file. To add a kernel: its file's name, without .py, and its
mutations below; the tests are test_<name>.py, or what TESTS says.
"""

from pathlib import Path

from tests.unit.kernels.triton.mutations_rows import ROW_MUTATIONS, ROW_TESTS

KERNELS = Path(__file__).resolve().parents[4] / "kernels" / "triton"
TESTS = {
    "paged_tiles": ("test_large_cache", "test_prefill_attention", "test_decode_attention"),
    "write_kv": ("test_large_cache", "test_write_kv"),
    **ROW_TESTS,
}

# file -> (old, new)
MUTATIONS: dict[str, list[tuple[str, str]]] = {
    "write_kv": [
        ("head < H + 2 * K, D, INTERLEAVED)\n    if R", "head < H + K, D, INTERLEAVED)\n    if R"),
        ("rotates = (head < H + K)", "rotates = (head < H + 2 * K)"),
        ("rotates = (head < H + K)", "rotates = (head < H)"),
        ("x.dtype), x)\n", "x.dtype), y)\n"),
        ("a * c - b * s", "a * c + b * s"),
        ("b * c + a * s", "b * c - a * s"),
        ("cos_ptr + token * (R // 2)", "cos_ptr + token * (D // 2)"),
        ("sin_ptr + token * (R // 2)", "sin_ptr"),
        ("pair < R // 2, pair, pair + R // 2)", "pair < R // 2, pair, pair)"),
        ("pair + R // 2, pair + D // 2)", "pair + D // 2, pair + D // 2)"),
        ("x, y, head < H, D, INTERLEAVED)", "x, y, head < H - 1, D, INTERLEAVED)"),
        ("token * qkv_stride", "token * ((H + 2 * K) * D)"),
        ("(slot // B) * block_stride", "(slot // B).to(tl.int32) * block_stride"),
        ("(head - H) * (B * D)", "head * (B * D)"),
        ("(slot % B) * D", "(slot % B)"),
        ("& (slot >= 0)", ""),
        ("(head >= H) & ", ""),
        ("(head < H + 2 * K) & (slot", "(head < H + K) & (slot"),
        ("kv_cache[:, layer], qkv", "kv_cache, qkv"),
        ("tl.load(row + d, mask=mask & (d < D))", "tl.load(row + d, mask=mask & (d < D // 2))"),
        ("tl.join(x, y)", "tl.join(y, x)"),
        ("mask=mask & (d < D))\n    else", "mask=mask)\n    else"),
        ("mask = mask & (tl.arange(0, x.shape[1])[None, :] < D // 2)\n        tl.store", "tl.store"),
    ],
    "prefill_attention": [
        ("group // rows + len(seq_lens)", "group // rows"),
        ("(ends - starts) * G, ROWS", "ends - starts, ROWS"),
        ("mask=s < num_sequences, other=0)\n    sequence", "mask=s < num_sequences - 1, other=0)\n    sequence"),
        ("G, ROWS) - 1 - tile)", "G, ROWS) - 2 - tile)"),
        ("token = row // G", "token = row // G + 1"),
        ("seq_len - num_tokens + token", "token"),
        ("seq_len - num_tokens + token", "seq_len - num_tokens + token + 1"),
        ("tl.max(positions, axis=0), seq_len - 1)", "tl.max(positions, axis=0), seq_len)"),
        ("tl.min(positions, axis=0)", "tl.max(positions, axis=0)"),
        ("(token < num_tokens)[:, None] & ", ""),
        ("(start + token).to", "token.to"),
        ("kv_head * G + row % G", "kv_head + row % G * K"),
        ("query_ptr + row_tokens * query_stride", "query_ptr + row_tokens * out_stride"),
        ("first_position - WINDOW + 1, 0)", "first_position - WINDOW + TILE + 1, 0)"),
        ("layer_cache_ptr + kv_head * B * D", "layer_cache_ptr + kv_head * D"),
        ("sequence.to(tl.int64) * table_stride", "0"),
        ("    K * B * D, first", "    B * D, first"),
        ("last_position // TILE + 1, scale", "last_position // TILE, scale"),
        ("kv_cache[:, layer]", "kv_cache"),
        ("acc / tl.where(total == 0, 1.0, total)[:, None]", "acc"),
        ("tl.where(total == 0, 1.0, total)", "total"),
        ("out_ptr + row_tokens * out_stride", "out_ptr + row_tokens * query_stride"),
    ],
    "decode_attention": [
        ("max_pieces = target + num_sequences", "max_pieces = target"),
        ("tl.maximum(seq_len - Q + 1 - WINDOW, 0)", "tl.maximum(seq_len - WINDOW, 0)"),
        ("mask=s < num_sequences, other=0)\n    tiles", "mask=s < num_sequences - 1, other=0)\n    tiles"),
        ("tl.cdiv(lengths, TILE) -", "lengths // TILE -"),
        ("return tl.cdiv(tiles, piece_tiles)", "return tiles // piece_tiles"),
        ("+ piece_in_sequence * piece_tiles", "+ piece_in_sequence"),
        ("first_key // TILE + piece_in", "piece_in"),
        ("tl.minimum(first_tile + piece_tiles, tl.cdiv(seq_len, TILE))", "tl.cdiv(seq_len, TILE)"),
        ("tl.minimum(first_tile + piece_tiles, tl.cdiv(seq_len, TILE))", "first_tile + piece_tiles - 1"),
        ("tl.program_id(2) * ROWS", "0"),
        ("token = row // G\n", "token = row % Q\n"),
        ("(sequence * Q + token)", "(sequence + token)"),
        ("kv_head * G + row % G)[:, None]", "kv_head * G)[:, None]"),
        ("q.to(DOT), seq_len - Q + token, seq_len", "q.to(DOT), seq_len - 1 + token * 0, seq_len"),
        ("token, seq_len - Q, seq_len - 1", "token, seq_len - 1, seq_len - 1"),
        ("seq_len - Q, seq_len - 1, first_key", "seq_len - Q, seq_len, first_key"),
        ("layer_cache_ptr + kv_head * B * D", "layer_cache_ptr"),
        ("sequence.to(tl.int64) * table_stride", "0"),
        ("    K * B * D, first", "    B * D, first"),
        ("kv_cache[:, layer]", "kv_cache"),
        ("(piece * K + kv_head).to", "(piece + kv_head).to"),
        ("tl.where(s < sequence, pieces, 0)", "tl.where(s <= sequence, pieces, 0)"),
        ("range(0, num_pieces, PIECES)", "range(0, 1, PIECES)"),
        ("exists = piece < num_pieces", "exists = piece < num_pieces - 1"),
        ("(token % Q) * G + head % G", "head % G"),
        ("tl.exp2(piece_tops - shift)", "tl.exp2(piece_tops * 0)"),
        ("acc = acc * rescale", "acc = acc"),
        ("total = total * rescale", "total = total"),
        ("tl.where(total == 0, 1.0, total)", "total"),
        ("to(tl.int64) * out_stride", "to(tl.int64) * (G * D)"),
        ("mask=d < D)", "mask=d < D - 1)"),
    ],
    "paged_tiles": [
        ("tl.maximum(last_position - WINDOW + 1, 0)", "tl.maximum(first_position - WINDOW + 1, 0)"),
        ("(first_position + 1) // TILE", "(first_position + TILE) // TILE"),
        ("(at >= first_key) & ", ""),
        ("(at <= last_position)", "(at <= last_position + 1)"),
        ("at // B, mask", "at, mask"),
        ("block.to(tl.int64) * block_stride", "block * block_stride"),
        ("(at % B)[:, None] * D + d", "at[:, None] * D + d"),
        ("(at % B)[:, None] * D + d", "(at % B)[:, None] * q.shape[1] + d"),
        ("exists[:, None] & (d < D)", "exists[:, None]"),
        ("k = tl.load(place, mask=d < D, other=0.0)", "k = tl.load(place, mask=d < D // 2, other=0.0)"),
        ("v = tl.load(place + value_offset).to", "v = tl.load(place).to"),
        ("_tanh(scores * (scale / SOFTCAP))", "_tanh(scores * scale)"),
        ("(SOFTCAP * _LOG2_E)", "SOFTCAP"),
        ("scores *= scale * _LOG2_E", "scores *= scale"),
        ("seen = at[None, :] <= positions", "seen = at[None, :] < positions"),
        ("at[None, :] > positions[:, None] - WINDOW", "at[None, :] >= positions[:, None] - WINDOW"),
        ("tl.maximum(top, tl.max(scores, axis=1))", "tl.maximum(top, 0.0)"),
        ('tl.where(new_top == float("-inf"), 0.0, new_top)', "new_top"),
        ("total = total * rescale", "total = total"),
        ("acc = acc * rescale[:, None]", "acc = acc"),
        ("    top = new_top", "    top = top"),
        ("tl.abs(x) * (-2 *", "tl.abs(x) * (-1 *"),
        ("tl.where(x < 0, -magnitude, magnitude)", "magnitude"),
        ("tl.sum(tl.where(ends <= index, counts, 0), axis=0)", "0"),
        ("(ends <= index).to", "(ends < index).to"),
    ],
    **ROW_MUTATIONS,
}


def every_id() -> list[str]:
    """write_kv:0, write_kv:1, ..."""
    return [f"{name}:{index}" for name, mutations in MUTATIONS.items() for index in range(len(mutations))]


def mutated(name: str, old: str, new: str) -> str:
    """The source of the kernel with the mutation. ValueError: `old` is not there exactly once, or Python rejects it."""
    source = (KERNELS / f"{name}.py").read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{name}: {source.count(old)} times in the file: {old!r}")
    changed = source.replace(old, new)
    try:
        compile(changed, name, "exec")
    except SyntaxError as error:
        raise ValueError(f"{name}: {error}: {new!r}") from error
    return changed
