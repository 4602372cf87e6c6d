"""Products of integers, quantized x @ weight.T + bias: the loops over tokens, panels of outputs and tiles of rows."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, lazy_loop, strict
from kvasir.kernels.cpu.integer_block import BLOCK, BLOCK_WORDS, quantize_block
from kvasir.kernels.cpu.integer_tile import multiply_blocks
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS
from kvasir.kernels.cpu.products import MOST_PIECES, rows_of_tile
from kvasir.kernels.cpu.simd import float32_array, int8_array, int32_array, next_piece, padded, uint8_array

# Shapes: T tokens  I inputs  O outputs  P panels of PANEL outputs  G blocks of BLOCK inputs
_MOST_ROWS = ROWS[-1]
_AHEAD_BYTES = 2048
_MANY_ROWS = 128  # from here on, rows go in blocks
_ROWS_OF_A_BLOCK, _BYTES_OF_A_BLOCK = 192, 512 << 10

# All is `strict`: in a function with relaxed floating point, what a tile computes would be relaxed as well.


@strict
def _quantize(counter: Any, x: Any, words: Any) -> None:
    num_tokens, num_inputs = x.shape
    last = np.zeros(BLOCK, np.float32)
    while True:
        t = next_piece(counter)
        if t >= num_tokens:
            return
        row = words.ctypes.data + t * words.strides[0]
        for block in range(num_inputs // BLOCK):
            quantize_block(x.ctypes.data + t * x.strides[0] + 4 * BLOCK * block, row + 4 * BLOCK_WORDS * block)
        rest = num_inputs % BLOCK
        if rest > 0:
            for i in range(rest):
                last[i] = x[t, num_inputs - rest + i]
            quantize_block(last.ctypes.data, row + 4 * BLOCK_WORDS * (num_inputs // BLOCK))


@lazy_loop
def quantize(arguments: Any) -> None:
    """[_, T, I, G, x, words [T, G, BLOCK_WORDS]]"""
    a = carray(arguments, 6)
    _quantize(arguments, float32_array(a[4], (a[1], a[2])), int32_array(a[5], (a[1], a[3], BLOCK_WORDS)))


@strict
def _multiply_rows(x: Any, start: Any, stop: Any, panels: Any, p: Any, scales: Any, bias: Any, out: Any, next_p: Any,
                   ) -> None:  # fmt: skip
    """out[start:stop] of one panel"""
    num_blocks, panel_bytes = x.shape[1], panels.strides[0]
    panel = panels.ctypes.data + p * panel_bytes
    # A single tile is as fast as its panel comes from memory. With several, the first two fetch the next panel,
    # so that it comes in evenly.
    ahead, ahead_step = panel + _AHEAD_BYTES, panel_bytes // num_blocks
    if stop - start > _MOST_ROWS:
        ahead, ahead_step = panels.ctypes.data + next_p * panel_bytes, ahead_step // 2
    t = start
    while t < stop:
        rows = rows_of_tile(stop - t)
        multiply_blocks(
            x.ctypes.data + t * x.strides[0], x.strides[0], rows, panels, panel,
            scales.ctypes.data + p * scales.strides[0], num_blocks, ahead, ahead_step,
            bias + 4 * p * PANEL if bias != 0 else 0, out.ctypes.data + t * out.strides[0] + 4 * p * PANEL,
            out.strides[0], min(PANEL, out.shape[1] - p * PANEL),
        )  # fmt: skip
        ahead += panel_bytes // 2
        if t > start:
            ahead_step = 0
        t += rows


@strict
def _multiply_few(counter: Any, x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    num_panels = panels.shape[0]
    panels_a_piece = max(1, num_panels // MOST_PIECES)
    piece = next_piece(counter)
    while piece * panels_a_piece < num_panels:
        next_first = next_piece(counter)
        end = min((piece + 1) * panels_a_piece, num_panels)
        for p in range(piece * panels_a_piece, end):
            next_p = p + 1 if p + 1 < end else next_first * panels_a_piece
            _multiply_rows(x, 0, len(x), panels, p, scales, bias, out, next_p)
        piece = next_first


@strict
def _multiply_many(counter: Any, x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    """A piece is a panel and as many rows of x as stay in the second cache while panel after panel passes."""
    num_tokens, num_panels = len(x), panels.shape[0]
    most = max(_MOST_ROWS, min(_ROWS_OF_A_BLOCK, _BYTES_OF_A_BLOCK // x.strides[0]))
    num_blocks = (num_tokens + most - 1) // most
    block = padded((num_tokens + num_blocks - 1) // num_blocks, _MOST_ROWS)
    while True:
        piece = next_piece(counter)
        start, p = piece // num_panels * block, piece % num_panels
        if start >= num_tokens:
            return
        _multiply_rows(x, start, min(start + block, num_tokens), panels, p, scales, bias, out, (p + 1) % num_panels)


@strict
def _multiply(counter: Any, x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    """x [T, G, BLOCK_WORDS]; panels [P, bytes of a panel]; scales [P, bytes], block by block; bias: address, or 0"""
    if len(x) < _MANY_ROWS:
        _multiply_few(counter, x, panels, scales, bias, out)
    else:
        _multiply_many(counter, x, panels, scales, bias, out)


# Arguments: [counter, T, G, O, x, panels, P, bytes of a panel, scales, bytes of a panel's scales, bias or 0, out]


@lazy_loop
def multiply_8_bits(arguments: Any) -> None:
    a = carray(arguments, 12)
    x, panels = int32_array(a[4], (a[1], a[2], BLOCK_WORDS)), int8_array(a[5], (a[6], a[7]))
    out = float32_array(a[11], (a[1], a[3]))
    _multiply(arguments, x, panels, uint8_array(a[8], (a[6], a[9])), a[10], out)


@lazy_loop
def multiply_4_bits(arguments: Any) -> None:
    a = carray(arguments, 12)
    x, panels = int32_array(a[4], (a[1], a[2], BLOCK_WORDS)), uint8_array(a[5], (a[6], a[7]))
    out = float32_array(a[11], (a[1], a[3]))
    _multiply(arguments, x, panels, uint8_array(a[8], (a[6], a[9])), a[10], out)
