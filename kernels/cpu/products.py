"""Products with packed weights, x @ weight.T + bias: the compiled loops over panels of outputs and tiles of rows.

Few rows take each panel as it comes from memory; many rows go in blocks.
"""

from typing import Any

from kvasir.kernels.cpu.compiling import carray, compiled, lazy_loop
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS, add_part, has_groups, multiply_panel
from kvasir.kernels.cpu.row_blocks import expand_slab, multiply_many
from kvasir.kernels.cpu.simd import empty_in_lines, float32_array, int8_array, next_piece, uint8_array, uint16_array

# Shapes: T tokens  I inputs  O outputs  P panels of PANEL outputs  G groups of inputs with scales of their own
MOST_PIECES = 32
_MOST_ROWS = ROWS[-1]
_FEWER_ROWS = ROWS[-2]
_AHEAD_BYTES = 8192
_MANY_ROWS = 64  # from here on, rows go in blocks
_INPUTS_OF_A_PART = 144  # of a panel: what several tiles share stays in the first cache
_PARTS_AHEAD = 2


@compiled
def rows_of_tile(num_left: Any) -> Any:
    """So that the last tiles are as full as may be."""
    if num_left <= _MOST_ROWS or num_left > 2 * _FEWER_ROWS:
        return min(num_left, _MOST_ROWS)
    return _FEWER_ROWS


@compiled
def _tile(x: Any, t: Any, first: Any, count: Any, rows: Any, panels: Any, panel: Any, scales: Any, scale_bytes: Any,
          group_size: Any, ahead: Any, ahead_step: Any, border: Any, behind: Any, place: Any, stride: Any,
          ) -> None:  # fmt: skip
    """Rows of PANEL at `place` = x[t + r, first : first + count] @ the panel at this address"""
    multiply_panel(
        x.ctypes.data + t * x.strides[0] + 4 * first, x.strides[0] // 4, rows, panels, panel, scales, scale_bytes,
        group_size, count, ahead, ahead_step, border, behind, place, stride,
    )  # fmt: skip


@compiled
def _write(sums: Any, start: Any, count: Any, first_output: Any, width: Any, bias: Any, has_bias: Any, out: Any,
           ) -> None:  # fmt: skip
    """The first rows and columns of sums become those of out from `start` and `first_output` on."""
    for r in range(count):
        if has_bias:
            for c in range(width):
                out[start + r, first_output + c] = sums[r, c] + bias[first_output + c]
        else:
            for c in range(width):
                out[start + r, first_output + c] = sums[r, c]


@compiled
def _multiply_expanded(x: Any, panels: Any, p: Any, next_panel: Any, scales: Any, scale_bytes: Any, group_size: Any,
                       part: Any, sums: Any) -> None:  # fmt: skip
    """sums = x @ panel p, part by part of its inputs: each becomes float32 once for all tiles"""
    num_tokens, num_inputs = x.shape
    panel, input_bytes = panels.ctypes.data + p * panels.strides[0], panels.strides[0] // num_inputs
    num_tiles = (num_tokens + _MOST_ROWS - 1) // _MOST_ROWS
    distance = min(_PARTS_AHEAD * len(part), num_inputs)
    sums[:] = 0
    for first in range(0, num_inputs, len(part)):
        count = min(len(part), num_inputs - first)
        expand_slab(panels, p, scales, scale_bytes, group_size, first, count, part)
        # All tiles fetch a later part together, so that it comes in evenly.
        later = first + distance
        ahead = panel + later * input_bytes if later < num_inputs else next_panel + (later - num_inputs) * input_bytes
        ahead_step = (input_bytes + num_tiles - 1) // num_tiles
        t = 0
        while t < num_tokens:
            rows = rows_of_tile(num_tokens - t)
            add_part(
                x.ctypes.data + t * x.strides[0] + 4 * first, x.strides[0], rows, part.ctypes.data, count, ahead,
                ahead_step, sums.ctypes.data + t * sums.strides[0], sums.strides[0],
            )  # fmt: skip
            ahead += ahead_step * count
            t += rows


@compiled
def _multiply_panel(x: Any, panels: Any, p: Any, next_p: Any, scales: Any, group_size: Any, bias: Any, has_bias: Any,
                    out: Any, part: Any, sums: Any) -> None:  # fmt: skip
    num_tokens, num_inputs = x.shape
    panel, panel_bytes = panels.ctypes.data + p * panels.strides[0], panels.strides[0]
    panel_scales = scales.ctypes.data + p * scales.strides[0]
    scale_bytes = scales.shape[1] // ((num_inputs + group_size - 1) // group_size)
    first_output = p * PANEL
    width = min(PANEL, out.shape[1] - first_output)
    next_panel = panels.ctypes.data + next_p * panels.strides[0]
    if has_groups(panels) and len(part) > 0:
        _multiply_expanded(x, panels, p, next_panel, scales, scale_bytes, group_size, part, sums)
        _write(sums, 0, num_tokens, first_output, width, bias, has_bias, out)
        return
    # A single tile is as fast as memory: it always fetches what it will need so many bytes later, at last of the next
    # panel. Several fetch the next panel together, so that it comes in evenly.
    ahead, ahead_step = panel + _AHEAD_BYTES, panel_bytes // num_inputs
    border = max(0, num_inputs - _AHEAD_BYTES // ahead_step)
    if num_tokens > _MOST_ROWS:
        num_tiles = (num_tokens + _MOST_ROWS - 1) // _MOST_ROWS
        ahead, ahead_step, border = next_panel, (ahead_step + num_tiles - 1) // num_tiles, num_inputs
    is_whole = width == PANEL and not has_bias
    t = 0
    while t < num_tokens:
        rows = rows_of_tile(num_tokens - t)
        place, stride = sums.ctypes.data, sums.strides[0]
        if is_whole:
            place, stride = out.ctypes.data + t * out.strides[0] + 4 * first_output, out.strides[0]
        _tile(x, t, 0, num_inputs, rows, panels, panel, panel_scales, scale_bytes, group_size, ahead, ahead_step,
              border, next_panel, place, stride)  # fmt: skip
        if not is_whole:
            _write(sums, t, rows, first_output, width, bias, has_bias, out)
        ahead += ahead_step * num_inputs
        t += rows


@compiled
def _multiply_few(counter: Any, x: Any, panels: Any, scales: Any, group_size: Any, bias: Any, has_bias: Any, out: Any,
                  ) -> None:  # fmt: skip
    num_panels = panels.shape[0]
    panels_a_piece = max(1, num_panels // MOST_PIECES)
    is_expanded = has_groups(panels) and len(x) > _MOST_ROWS  # for one tile it would not pay; nor for float16
    part = empty_in_lines((_INPUTS_OF_A_PART if is_expanded else 0, PANEL))
    sums = empty_in_lines((len(x), PANEL))
    piece = next_piece(counter)
    while piece * panels_a_piece < num_panels:
        next_first = next_piece(counter)
        end = min((piece + 1) * panels_a_piece, num_panels)
        for p in range(piece * panels_a_piece, end):
            next_p = p + 1 if p + 1 < end else next_first * panels_a_piece
            _multiply_panel(x, panels, p, next_p, scales, group_size, bias, has_bias, out, part, sums)
        piece = next_first


@compiled
def _multiply(counter: Any, x: Any, panels: Any, is_float32: Any, scales: Any, group_size: Any, bias: Any,
              has_bias: Any, out: Any) -> None:  # fmt: skip
    """panels [P, elements of a panel]; scales [P, bytes of a panel's scales], group by group"""
    if x.shape[0] < _MANY_ROWS:
        _multiply_few(counter, x, panels, scales, group_size, bias, has_bias, out)
    else:
        multiply_many(counter, x, panels, is_float32, scales, group_size, bias, has_bias, out)


# Arguments: [counter, T, I, O, x, panels, P, elements of a panel, scales, bytes of a panel's scales, group size,
#             bias or 0, out]


@lazy_loop
def multiply_float32(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = float32_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, True, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_float16(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = uint16_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, False, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_int8(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = int8_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, False, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip


@lazy_loop
def multiply_int4(arguments: Any) -> None:
    a = carray(arguments, 13)
    panels = uint8_array(a[5], (a[6], a[7]))
    _multiply(arguments, float32_array(a[4], (a[1], a[2])), panels, False, uint8_array(a[8], (a[6], a[9])), a[10],
              float32_array(a[11], (a[3],)), a[11] != 0, float32_array(a[12], (a[1], a[3])))  # fmt: skip
