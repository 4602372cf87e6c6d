"""Products with packed weights, x @ weight.T + bias: the compiled loops over panels of outputs and tiles of rows."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.panel_tile import PANEL, ROWS, multiply_panel
from kvasir.kernels.cpu.simd import (
    carray,
    compiled,
    float32_array,
    int8_array,
    lazy_loop,
    next_piece,
    uint8_array,
    uint16_array,
)

# Shapes: T tokens  I inputs  O outputs  P panels of PANEL outputs  G groups of inputs with scales of their own
MOST_PIECES = 32
_MOST_ROWS = ROWS[-1]
_FEWER_ROWS = ROWS[-2]
_AHEAD_BYTES = 2048


@compiled
def _rows_of_tile(num_left: Any) -> Any:
    """So that the last tiles are as full as may be."""
    if num_left <= _MOST_ROWS or num_left > 2 * _FEWER_ROWS:
        return min(num_left, _MOST_ROWS)
    return _FEWER_ROWS


@compiled
def _tile(x: Any, t: Any, rows: Any, panels: Any, panel: Any, scales: Any, scale_bytes: Any, group_size: Any,
          ahead: Any, ahead_step: Any, sums: Any) -> None:  # fmt: skip
    """sums[r] = x[t + r] @ the panel at this address"""
    num_inputs = x.shape[1]
    for r in range(_MOST_ROWS):
        for c in range(PANEL):
            sums[r, c] = 0
    for first in range(0, num_inputs, group_size):
        multiply_panel(
            x.ctypes.data + t * x.strides[0], x.strides[0] // 4, rows, panels, panel, scales, first,
            min(group_size, num_inputs - first), ahead, ahead_step, sums.ctypes.data,
        )  # fmt: skip
        scales += scale_bytes


@compiled
def _multiply_panel(x: Any, panels: Any, p: Any, next_p: Any, scales: Any, group_size: Any, bias: Any, has_bias: Any,
                    out: Any, sums: Any) -> None:  # fmt: skip
    num_tokens, num_inputs = x.shape
    panel, panel_bytes = panels.ctypes.data + p * panels.strides[0], panels.strides[0]
    panel_scales = scales.ctypes.data + p * scales.strides[0]
    scale_bytes = scales.shape[1] // ((num_inputs + group_size - 1) // group_size)
    first_output = p * PANEL
    width = min(PANEL, out.shape[1] - first_output)
    next_panel = panels.ctypes.data + next_p * panels.strides[0]
    # A single tile is as fast as its panel comes from memory. With several, the first two fetch the next panel,
    # so that it comes in evenly.
    ahead, ahead_step = panel + _AHEAD_BYTES, panel_bytes // num_inputs
    if num_tokens > _MOST_ROWS:
        ahead, ahead_step = next_panel, ahead_step // 2
    t = 0
    while t < num_tokens:
        rows = _rows_of_tile(num_tokens - t)
        _tile(x, t, rows, panels, panel, panel_scales, scale_bytes, group_size, ahead, ahead_step, sums)
        for r in range(rows):
            if has_bias:
                for c in range(width):
                    out[t + r, first_output + c] = sums[r, c] + bias[first_output + c]
            else:
                for c in range(width):
                    out[t + r, first_output + c] = sums[r, c]
        ahead += panel_bytes // 2
        if t > 0:
            ahead_step = 0
        t += rows


@compiled
def _multiply(counter: Any, x: Any, panels: Any, scales: Any, group_size: Any, bias: Any, has_bias: Any, out: Any,
              ) -> None:  # fmt: skip
    """panels [P, elements of a panel]; scales [P, bytes of a panel's scales], group by group"""
    num_panels = panels.shape[0]
    panels_a_piece = max(1, num_panels // MOST_PIECES)
    sums = np.empty((_MOST_ROWS, PANEL), np.float32)
    piece = next_piece(counter)
    while piece * panels_a_piece < num_panels:
        next_first = next_piece(counter)
        end = min((piece + 1) * panels_a_piece, num_panels)
        for p in range(piece * panels_a_piece, end):
            next_p = p + 1 if p + 1 < end else next_first * panels_a_piece
            _multiply_panel(x, panels, p, next_p, scales, group_size, bias, has_bias, out, sums)
        piece = next_first


# Arguments: [counter, T, I, O, x, panels, P, elements of a panel, scales, bytes of a panel's scales, group size,
#             bias or 0, out]


@lazy_loop
def multiply_float32(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = float32_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_float16(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = uint16_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_int8(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = int8_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_int4(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = uint8_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip
