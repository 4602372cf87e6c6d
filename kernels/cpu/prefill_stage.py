"""Keys and values of one tile, out of the blocks of the cache, as the register tiles of attention read them."""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import intrinsic, ir, strict, types
from kvasir.kernels.cpu.kv_rows import address_of, rows_at, scale_of
from kvasir.kernels.cpu.prefill_tile import SCORE_COLUMNS
from kvasir.kernels.cpu.simd import LANES, as_floats, widened
from kvasir.kernels.cpu.tile_code import I64, number

# Shapes: C columns  D head dim  W = D, padded     Of a tile's columns, one is a token


@strict
def stage(cache: Any, shape: Any, layer: Any, block_table: Any, head: Any, first: Any, count: Any, width: Any,
          nothing: Any, places: Any, keys: Any, values: Any, scales: Any) -> None:  # fmt: skip
    """Tokens [first, first + count) of one head -> keys [C / SCORE_COLUMNS, W, SCORE_COLUMNS], values [C, W],
    scales [2, C] of both

    As they are in the cache, with zeros behind, up to `width`. nothing: a row of zeros; places [2, C]: of rows
    """
    head_dim = shape[3]
    _locate(cache, shape, layer, block_table, head, first, count, places, scales)
    places[:, count:width] = nothing.ctypes.data
    scales[:, count:width] = 0
    in_vectors = head_dim // LANES * LANES
    for column in range(0, width, LANES):
        target = keys[column // SCORE_COLUMNS]
        place = target.ctypes.data + 4 * (column % SCORE_COLUMNS)
        for d in range(0, in_vectors, LANES):
            _transpose(cache, places.ctypes.data + 8 * column, d, place + d * target.strides[0], target.strides[0])
        for i in range(column, column + LANES):
            row = rows_at(cache, places[0, i], 1, head_dim)
            for d in range(in_vectors, head_dim):
                target[d, i % SCORE_COLUMNS] = widened(row[0, d])
    for i in range(width):
        row = rows_at(cache, places[1, i], 1, head_dim)
        for d in range(head_dim):
            values[i, d] = widened(row[0, d])


@strict
def _locate(cache: Any, shape: Any, layer: Any, block_table: Any, head: Any, first: Any, count: Any, places: Any,
            scales: Any) -> None:  # fmt: skip
    num_layers, num_kv_heads, block_size, head_dim = shape
    index, offset = first // block_size, first % block_size
    for i in range(count):
        for which in range(2):
            address = address_of(cache, (num_layers, num_kv_heads), block_table[index], layer, which, head)
            places[which, i] = address + offset * head_dim * cache.itemsize
            scales[which, i] = scale_of(rows_at(cache, address, block_size, head_dim), offset)
        offset += 1
        if offset == block_size:
            index, offset = index + 1, 0


@intrinsic
def _transpose(typing: Any, cache: Any, places: Any, first: Any, out: Any, out_stride: Any) -> Any:
    """out[d, i] = the rows at LANES addresses, as float32: element first + d of row i. d < LANES; stride in bytes"""
    element = cache.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, places, first, out, out_stride = arguments
        vector = ir.VectorType(context.get_value_type(element), LANES)
        offset = builder.mul(first, number(element.bitwidth // 8))
        rows = []
        for i in range(LANES):
            place = builder.add(tile_code.load(builder, places, 8 * i, I64), offset)
            rows.append(as_floats(builder, element, tile_code.load(builder, place, 0, vector, align=1), LANES))
        for d, column in enumerate(tile_code.transposed(builder, rows)):
            place = tile_code.row(builder, out, out_stride, number(d))
            builder.store(column, tile_code.pointer(builder, place, 0, column.type), align=4)
        return context.get_dummy_value()

    return types.void(cache, *[types.int64] * 4), codegen
