"""Loops over independent rows: normalisation, gated activation, rotation and writing into the KV cache."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, compiled, lazy_loop, loop
from kvasir.kernels.cpu.kv_rows import address_of, cache_shape, rows_at, write_row
from kvasir.kernels.cpu.simd import exp2, float32_array, float32_of, int8_array, int64_array, next_piece, uint16_array

# Shapes: T tokens  C hidden size  I intermediate size  N blocks  L layers  B tokens a block
#   H query heads  K KV heads  D head dim
ROWS_A_PIECE = 4
_LOG2_E = np.float32(1.4426950408889634)
_GELU_A = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_B = np.float32(1.5957691216057308 * 0.044715)


@compiled
def _rms_norm(counter: Any, hidden: Any, residual: Any, weight: Any, eps: Any, out: Any, has_residual: Any) -> None:
    num_rows, size = hidden.shape
    while True:
        first = next_piece(counter) * ROWS_A_PIECE
        if first >= num_rows:
            return
        for t in range(first, min(first + ROWS_A_PIECE, num_rows)):
            total = np.float32(0)
            if has_residual:
                for c in range(size):
                    value = residual[t, c] + hidden[t, c]
                    residual[t, c] = value
                    total += value * value
            else:
                for c in range(size):
                    total += hidden[t, c] * hidden[t, c]
            scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
            if has_residual:
                for c in range(size):
                    out[t, c] = residual[t, c] * scale * weight[c]
            else:
                for c in range(size):
                    out[t, c] = hidden[t, c] * scale * weight[c]


@loop
def rms_norm(arguments: Any) -> None:
    a = carray(arguments, 9)
    shape = (a[1], a[2])
    has_residual = a[4] != 0
    hidden = float32_array(a[3], shape)
    residual = float32_array(a[4], shape) if has_residual else hidden
    eps = float32_of(a[6])
    out = float32_array(a[7], shape)
    _rms_norm(arguments, hidden, residual, float32_array(a[5], (a[2],)), eps, out, has_residual)


@compiled
def _silu_mul(counter: Any, gate_up: Any, out: Any) -> None:
    num_rows, size = out.shape
    while True:
        first = next_piece(counter) * ROWS_A_PIECE
        if first >= num_rows:
            return
        for t in range(first, min(first + ROWS_A_PIECE, num_rows)):
            for c in range(size):
                gate = gate_up[t, c]
                e = exp2(-abs(gate) * _LOG2_E)  # never overflows
                top = np.float32(1) if gate >= 0 else e
                out[t, c] = gate * top / (np.float32(1) + e) * gate_up[t, size + c]


@lazy_loop
def silu_mul(arguments: Any) -> None:
    a = carray(arguments, 5)
    _silu_mul(arguments, float32_array(a[3], (a[1], 2 * a[2])), float32_array(a[4], (a[1], a[2])))


@compiled
def _gelu_mul(counter: Any, gate_up: Any, out: Any) -> None:
    num_rows, size = out.shape
    while True:
        first = next_piece(counter) * ROWS_A_PIECE
        if first >= num_rows:
            return
        for t in range(first, min(first + ROWS_A_PIECE, num_rows)):
            for c in range(size):
                gate = gate_up[t, c]
                # (1 + tanh(x)) / 2 is the sigmoid of 2 x
                x = gate * (_GELU_A + _GELU_B * gate * gate)
                e = exp2(-abs(x) * _LOG2_E)  # never overflows
                top = np.float32(1) if x >= 0 else e
                out[t, c] = gate * top / (np.float32(1) + e) * gate_up[t, size + c]


@lazy_loop
def gelu_mul(arguments: Any) -> None:
    a = carray(arguments, 5)
    _gelu_mul(arguments, float32_array(a[3], (a[1], 2 * a[2])), float32_array(a[4], (a[1], a[2])))


@compiled
def _rotate(qkv: Any, t: Any, first: Any, half: Any, cos: Any, sin: Any) -> None:
    for d in range(first, first + half):
        x, y = qkv[t, d], qkv[t, d + half]
        c, s = cos[t, d - first], sin[t, d - first]
        qkv[t, d] = x * c - y * s
        qkv[t, d + half] = y * c + x * s


@compiled
def _write_kv(counter: Any, qkv: Any, num_heads: Any, half: Any, cos: Any, sin: Any, slots: Any, cache: Any,
              shape: Any, layer: Any) -> None:  # fmt: skip
    num_layers, num_kv_heads, block_size, head_dim = shape
    layout = (num_layers, num_kv_heads)
    while True:
        first = next_piece(counter) * ROWS_A_PIECE
        if first >= len(slots):
            return
        for t in range(first, min(first + ROWS_A_PIECE, len(slots))):
            if half > 0:
                for head in range(num_heads + num_kv_heads):
                    _rotate(qkv, t, head * head_dim, half, cos, sin)
            if slots[t] < 0:
                continue
            block, offset = slots[t] // block_size, slots[t] % block_size
            for head in range(num_kv_heads):
                key = qkv.ctypes.data + t * qkv.strides[0] + (num_heads + head) * head_dim * 4
                value = key + num_kv_heads * head_dim * 4
                rows = rows_at(cache, address_of(cache, layout, block, layer, 0, head), block_size, head_dim)
                write_row(rows, offset, key)
                rows = rows_at(cache, address_of(cache, layout, block, layer, 1, head), block_size, head_dim)
                write_row(rows, offset, value)


@compiled
def _start_write_kv(arguments: Any, a: Any, cache: Any) -> None:
    num_tokens, num_heads, half = a[1], a[3], a[15]
    num_layers, num_kv_heads, block_size, head_dim = a[10], a[11], a[12], a[14]
    qkv = float32_array(a[2], (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim))
    cos = float32_array(a[4], (num_tokens, half)) if half > 0 else qkv
    sin = float32_array(a[5], (num_tokens, half)) if half > 0 else qkv
    slots = int64_array(a[6], (num_tokens,))
    shape = (num_layers, num_kv_heads, block_size, head_dim)
    _write_kv(arguments, qkv, num_heads, half, cos, sin, slots, cache, shape, a[7])


@lazy_loop
def write_kv_float32(arguments: Any) -> None:
    a = carray(arguments, 16)
    _start_write_kv(arguments, a, float32_array(a[8], cache_shape(a[9], a[10], a[11], a[12], a[13])))


@lazy_loop
def write_kv_float16(arguments: Any) -> None:
    a = carray(arguments, 16)
    _start_write_kv(arguments, a, uint16_array(a[8], cache_shape(a[9], a[10], a[11], a[12], a[13])))


@lazy_loop
def write_kv_int8(arguments: Any) -> None:
    a = carray(arguments, 16)
    _start_write_kv(arguments, a, int8_array(a[8], cache_shape(a[9], a[10], a[11], a[12], a[13])))
