"""Root-mean-square normalisation, with the residual addition that precedes it."""

import torch
from torch import Tensor

from kvasir.kernels.backend import is_triton

# Shapes: T tokens  C hidden size


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """hidden [T, C], weight [C] -> normalised [T, C]

    With `residual` [T, C]: `residual += hidden` in place, and the sum is what is normalised.
    """
    if is_triton(hidden):
        from kvasir.kernels.triton import rms_norm as kernel

        return kernel.rms_norm(hidden, weight, eps, residual)
    if hidden.device.type != "cpu" or hidden.dtype != torch.float32:
        return rms_norm_reference(hidden, weight, eps, residual)
    from kvasir.kernels.cpu import rows, threads

    num_tokens, size = hidden.shape
    assert hidden.is_contiguous(), "the loop reads rows of C"
    assert residual is None or (residual.is_contiguous() and residual.shape == hidden.shape)
    out = torch.empty_like(hidden)
    threads.launch(
        rows.rms_norm, -(-num_tokens // rows.ROWS_A_PIECE),
        num_tokens, size, hidden.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
        threads.float_bits(eps), out.data_ptr(),
    )  # fmt: skip
    return out


def rms_norm_reference(hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    if residual is not None:
        hidden = residual.add_(hidden)
    precise = hidden.float()
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
    return weight * precise.to(hidden.dtype)
