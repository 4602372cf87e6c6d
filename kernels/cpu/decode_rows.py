"""Where the keys and values of a piece of decode attention lie: its rows by their addresses, and their scales."""

from typing import Any

from kvasir.kernels.cpu.compiling import strict
from kvasir.kernels.cpu.kv_rows import address_of, has_scales
from kvasir.kernels.cpu.simd import LANES, float32_array, padded, prefetch

# Shapes: B tokens a block  D head dim  C tokens of a split, at most  W tokens of a piece, padded to whole vectors
#   J query heads of a piece
# A place is what `decode_splits.locate` gives; a shape is (layers, KV heads, B, D).
_LINE_BYTES = 64


@strict
def list_rows(cache: Any, shape: Any, layer: Any, block_tables: Any, place: Any, heads: Any, rows: Any) -> Any:
    """rows [>= 2 W]: the addresses of a piece's keys, of its first head, the last one repeated up to W, and the
    first one that is seen for those before it; then of its values. -> W

    What `list_scales` will read is fetched into the cache.
    """
    num_layers, num_kv_heads, block_size, head_dim = shape
    s, _, _, first_head, start, end, low = place
    row_bytes, to_values = head_dim * cache.itemsize, num_kv_heads * cache.strides[0]
    address, width = cache.ctypes.data, padded(end - start, LANES)
    i = 0
    while start + i < end:
        block, offset = block_tables[s, (start + i) // block_size], (start + i) % block_size
        keys = address_of(cache, (num_layers, num_kv_heads), block, layer, 0, first_head)
        if has_scales(cache):
            for head in range(heads):
                scales = keys + head * cache.strides[0] + block_size * head_dim
                for byte in range(0, 4 * block_size, _LINE_BYTES):
                    prefetch(scales + byte)
                    prefetch(scales + byte + to_values)
        for k in range(offset, min(block_size, offset + end - start - i)):
            address = keys + k * row_bytes
            rows[i] = address
            i += 1
    rows[i:width] = address
    rows[:low] = rows[low]
    for i in range(width):
        rows[width + i] = rows[i] + to_values
    return width


@strict
def list_ahead(width: Any, num_ahead: Any, next_rows: Any, next_width: Any, rows: Any) -> None:
    """Behind a piece's rows come the first `num_ahead` of the next one."""
    first, count = 2 * width, min(num_ahead, 2 * next_width)
    for i in range(count):
        rows[first + i] = next_rows[i]
    rows[first + count : first + num_ahead] = rows[first - 1]


@strict
def _list_scales(cache: Any, shape: Any, layer: Any, block_tables: Any, place: Any, which: Any, head: Any,
                 scales: Any) -> None:  # fmt: skip
    num_layers, num_kv_heads, block_size, head_dim = shape
    s, _, _, _, start, end, low = place
    i, index, offset = 0, start // block_size, start % block_size
    while start + i < end:
        count = min(block_size - offset, end - start - i)
        values = address_of(cache, (num_layers, num_kv_heads), block_tables[s, index], layer, which, head)
        own, found = scales[i : i + count], float32_array(values + block_size * head_dim + 4 * offset, (count,))
        for k in range(count):
            own[k] = found[k]
        i, index, offset = i + count, index + 1, 0
    scales[:low] = 0


@strict
def scale(cache: Any, shape: Any, layer: Any, block_tables: Any, place: Any, heads: Any, which: Any, scales: Any,
          scores: Any) -> None:  # fmt: skip
    """scores [J, C]: [j, i] *= the scale of the piece's i-th key (which: 0), or value (1). scales [C] is scratch."""
    group, count = scores.shape[0] // heads, place[5] - place[4]
    for head in range(heads):
        _list_scales(cache, shape, layer, block_tables, place, which, place[3] + head, scales)
        for j in range(head * group, (head + 1) * group):
            row = scores[j]
            for i in range(count):
                row[i] *= scales[i]
