"""Products of many rows with packed weights: block by block of the rows, span by span of the panels."""

from typing import Any

from kvasir.kernels.cpu.compiling import compiled
from kvasir.kernels.cpu.panel_tile import PANEL, expand_panel
from kvasir.kernels.cpu.simd import empty_in_lines, next_piece, padded, zeros_in_lines
from kvasir.kernels.cpu.span_tile import SPAN, SPAN_ROWS, multiply_span

# Shapes: T tokens  I inputs  O outputs  P panels of PANEL outputs  G groups of inputs with scales of their own
# A block and a slab fill most of the second cache, which gives a tile its weights as fast as it multiplies.
_ROWS_OF_A_BLOCK, _BYTES_OF_A_BLOCK = 256, 600 << 10
_INPUTS_OF_A_SLAB = 1536


@compiled
def expand_slab(panels: Any, p: Any, scales: Any, scale_bytes: Any, group_size: Any, first: Any, count: Any,
                slab: Any) -> None:  # fmt: skip
    """slab[k] = input first + k of the panel, as float32"""
    panel, panel_scales = panels.ctypes.data + p * panels.strides[0], scales.ctypes.data + p * scales.strides[0]
    k = first
    while k < first + count:
        group = k // group_size
        length = min((group + 1) * group_size, first + count) - k
        place = slab.ctypes.data + (k - first) * 4 * PANEL
        expand_panel(panels, panel, panel_scales + group * scale_bytes, k, length, place)
        k += length


@compiled
def _multiply_rows(x: Any, start: Any, stop: Any, panels: Any, span: Any, next_span: Any, is_float32: Any, scales: Any,
                   group_size: Any, zeros: Any, bias: Any, out: Any, slab: Any, edge: Any) -> None:  # fmt: skip
    """out[start:stop] of SPAN panels = x @ panels + bias, slab by slab of their inputs

    The bias comes last, as in products of few rows, so that both add the same numbers in the same order.

    Panels of other numbers become float32 in `slab`, once for all of these rows. A tile that sticks out is made in
    `edge`. All tiles together fetch what the next slab is made of, of these panels or the next span's, so that it comes
    in evenly.
    """
    num_inputs = x.shape[1]
    scale_bytes = scales.shape[1] // ((num_inputs + group_size - 1) // group_size)
    p, other = SPAN * span, min(SPAN * span + 1, panels.shape[0] - 1)
    first_output = p * PANEL
    width = min(SPAN * PANEL, out.shape[1] - first_output)
    num_tiles, input_bytes = (stop - start + SPAN_ROWS - 1) // SPAN_ROWS, panels.strides[0] // num_inputs
    for first in range(0, num_inputs, _INPUTS_OF_A_SLAB):
        count = min(_INPUTS_OF_A_SLAB, num_inputs - first)
        weights = panels.ctypes.data + p * panels.strides[0] + first * 4 * PANEL
        weights_stride = (other - p) * panels.strides[0]
        end = bias if first + count == num_inputs else zeros
        if not is_float32:
            expand_slab(panels, p, scales, scale_bytes, group_size, first, count, slab[0])
            if SPAN > 1:
                expand_slab(panels, other, scales, scale_bytes, group_size, first, count, slab[1])
            weights, weights_stride = slab.ctypes.data, slab.strides[0]
        later, later_first = (span, first + count) if first + count < num_inputs else (next_span, 0)
        later_bytes = min(_INPUTS_OF_A_SLAB, num_inputs - later_first) * input_bytes  # of each of SPAN panels
        later_data = panels.ctypes.data + SPAN * later * panels.strides[0] + later_first * input_bytes
        ahead_step = (SPAN * later_bytes + num_tiles * count - 1) // (num_tiles * count)
        fetched = 0
        for t in range(start, stop, SPAN_ROWS):
            rows = min(SPAN_ROWS, stop - t)
            place, stride = out.ctypes.data + t * out.strides[0] + 4 * first_output, out.strides[0]
            is_whole = rows == SPAN_ROWS and width == SPAN * PANEL
            if not is_whole:
                place, stride = edge.ctypes.data, edge.strides[0]
                _copy(out[t : t + rows, first_output : first_output + width], edge)
            multiply_span(
                x.ctypes.data + t * x.strides[0] + first * 4, x.strides[0], rows, weights, weights_stride, count,
                later_data + fetched // later_bytes * panels.strides[0] + fetched % later_bytes, ahead_step,
                zeros.ctypes.data if first == 0 else place, 0 if first == 0 else stride, end.ctypes.data, place, stride,
            )  # fmt: skip
            fetched += ahead_step * count
            if not is_whole:
                _copy(edge[:rows, :width], out[t:, first_output:])


@compiled
def _copy(source: Any, target: Any) -> None:
    for r in range(source.shape[0]):
        for c in range(source.shape[1]):
            target[r, c] = source[r, c]


@compiled
def multiply_many(counter: Any, x: Any, panels: Any, is_float32: Any, scales: Any, group_size: Any, bias: Any,
                  has_bias: Any, out: Any) -> None:  # fmt: skip
    """A piece is SPAN panels and as many rows of x as stay in the second cache while panel after panel passes."""
    num_tokens, num_inputs = x.shape
    num_spans = (panels.shape[0] + SPAN - 1) // SPAN
    inputs = min(num_inputs, _INPUTS_OF_A_SLAB)
    most = max(SPAN_ROWS, min(_ROWS_OF_A_BLOCK, _BYTES_OF_A_BLOCK // (4 * inputs)))
    num_blocks = (num_tokens + most - 1) // most
    block = padded((num_tokens + num_blocks - 1) // num_blocks, SPAN_ROWS)
    slab = empty_in_lines((SPAN, 0 if is_float32 else inputs, PANEL))
    edge, zeros = zeros_in_lines((SPAN_ROWS, SPAN * PANEL)), zeros_in_lines((SPAN * PANEL,))
    span_bias = zeros_in_lines((SPAN * PANEL,))
    piece = next_piece(counter)
    while piece // num_spans * block < num_tokens:  # whole tiles may leave the last block nothing
        following = next_piece(counter)
        start, span = piece // num_spans * block, piece % num_spans
        if has_bias:
            first = span * SPAN * PANEL
            for c in range(min(SPAN * PANEL, len(bias) - first)):
                span_bias[c] = bias[first + c]
        _multiply_rows(x, start, min(start + block, num_tokens), panels, span, following % num_spans, is_float32,
                       scales, group_size, zeros, span_bias, out, slab, edge)  # fmt: skip
        piece = following
