"""The gated activation of Gemma's feed-forward layers."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvasir.kernels.backend import is_triton

# Shapes: T tokens  I intermediate size


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I]: gate, then up -> gelu(gate) * up [T, I], with the gelu that is made of a tanh"""
    if is_triton(gate_up):
        from kvasir.kernels.triton.gated import gated

        return gated(gate_up, "gelu")
    if gate_up.device.type != "cpu" or gate_up.dtype != torch.float32:
        return gelu_mul_reference(gate_up)
    from kvasir.kernels.cpu import rows, threads

    assert gate_up.is_contiguous(), "the loop reads rows of 2 I"
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    num_pieces = -(-num_tokens // rows.ROWS_A_PIECE)
    threads.launch(rows.gelu_mul, num_pieces, num_tokens, size, gate_up.data_ptr(), out.data_ptr())
    return out


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up
