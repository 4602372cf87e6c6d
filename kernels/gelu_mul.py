"""The gated activation of Gemma's feed-forward layers."""

from torch import Tensor
from torch.nn.functional import gelu

from kvasir.kernels.backend import is_triton

# Shapes: T tokens  I intermediate size


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I]: gate, then up -> gelu(gate) * up [T, I], with the gelu that is made of a tanh"""
    if is_triton(gate_up):
        from kvasir.kernels.triton.gated import gated

        return gated(gate_up, "gelu")
    return gelu_mul_reference(gate_up)


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up
