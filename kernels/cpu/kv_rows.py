"""Keys and values of one head of one block, as the compiled loops see them; by element type, at compile time.

    float32     values [B, D]
    float16     values [B, D], as uint16
    int8        values [B, D] | scales as float32 [B]

A cache is a 2-d array of the element type: a row for each head of keys, and of values, of each layer of each block.
"""

from typing import Any

from kvasir.kernels.cpu.compiling import carray, compiled, intrinsic, ir, overload, types
from kvasir.kernels.cpu.kv_codec import half_of, quantize_row
from kvasir.kernels.cpu.simd import float32_array, pointer_like, uint32_array

# Shapes: N blocks  L layers  K KV heads  B tokens a block  D head dim


@compiled
def cache_shape(num_blocks: Any, num_layers: Any, num_kv_heads: Any, block_size: Any, row_length: Any) -> Any:
    return num_blocks * num_layers * 2 * num_kv_heads, block_size * row_length


@compiled
def address_of(cache: Any, layout: Any, block: Any, layer: Any, which: Any, head: Any) -> Any:
    """Of the values [B, D]. layout: (L, K); which: 0 keys, 1 values"""
    num_layers, num_kv_heads = layout
    return cache.ctypes.data + (((block * num_layers + layer) * 2 + which) * num_kv_heads + head) * cache.strides[0]


@compiled
def rows_at(cache: Any, address: Any, block_size: Any, head_dim: Any) -> Any:
    """[B, D], of the element type"""
    return carray(pointer_like(cache, address), (block_size, head_dim))


@intrinsic
def _scale_at(typing: Any, rows: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        f32 = ir.FloatType()
        if rows.dtype != types.int8:
            return ir.Constant(f32, 1)
        return builder.load(builder.inttoptr(arguments[1], f32.as_pointer()), align=4)

    return types.float32(rows, types.int64), codegen


@intrinsic
def has_scales(typing: Any, cache: Any) -> Any:
    """Known at compile time: what hangs on it is left out of the other loops."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(cache.dtype == types.int8))

    return types.boolean(cache), codegen


@compiled
def scale_of(rows: Any, i: Any) -> Any:
    """What row i [D] of `rows` is multiplied by; 1 where there are no scales, and then the product costs nothing."""
    return _scale_at(rows, rows.ctypes.data + rows.size + 4 * i)


def write_row(rows: Any, i: Any, source: Any) -> None:
    """Row i becomes the D float32 values at address `source`, converted to the element type."""


@overload(write_row)
def _write_row(rows: Any, i: Any, source: Any) -> Any:
    return {types.float32: _copy_row, types.uint16: _to_float16, types.int8: _to_int8}[rows.dtype]


def _copy_row(rows: Any, i: Any, source: Any) -> None:
    values = float32_array(source, (rows.shape[1],))
    for d in range(rows.shape[1]):
        rows[i, d] = values[d]


def _to_float16(rows: Any, i: Any, source: Any) -> None:
    bits = uint32_array(source, (rows.shape[1],))
    for d in range(rows.shape[1]):
        rows[i, d] = half_of(bits[d])


def _to_int8(rows: Any, i: Any, source: Any) -> None:
    shape = (rows.shape[1],)
    scales = float32_array(rows.ctypes.data + rows.size, (rows.shape[0],))
    scales[i] = quantize_row(uint32_array(source, shape), float32_array(source, shape), rows[i])
