"""Matrix product with a weight that is kept in 8 bits and made whole as it is read."""

import torch
from torch import Tensor

from kvasir.kernels.backend import is_triton
from kvasir.kernels.kv_codec import E4M3_MAX, INT8_MAX

# Shapes: T tokens  I inputs  O outputs  G groups of inputs that share a scale: 1, or I / 32, I / 128, ...


def quantized_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] float -> x @ (weight * scales).T + bias, [T, O] in x's dtype; sums are in float32

    weight: [O, I] int8 or float8_e4m3fn without NaN      scales: [O, G] float; G divides I      bias: [O]
    ValueError: shapes that do not fit.
    """
    num_outputs, num_inputs = weight.shape
    if x.shape[1] != num_inputs or scales.shape[0] != num_outputs or num_inputs % scales.shape[1]:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, scales {tuple(scales.shape)}")
    if is_triton(x):
        from kvasir.kernels.triton import quantized_linear as kernel

        return kernel.quantized_linear(x, weight, scales, bias)
    return quantized_linear_reference(x, weight, scales, bias)


def quantize_weight(weight: Tensor, dtype: torch.dtype, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """weight [O, I] float -> [O, I] int8 or float8_e4m3fn, scales [O, G] float32

    The largest of a group is 127 or 448 scales. group_size None: the whole row is one.
    """
    groups = weight.float().view(len(weight), -1, group_size or weight.shape[1])  # [O, G, I / G]
    largest = E4M3_MAX if dtype == torch.float8_e4m3fn else INT8_MAX
    scales = groups.abs().amax(-1) / largest
    scaled = groups / torch.where(scales == 0, 1.0, scales)[:, :, None]
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype).flatten(1), scales


def quantized_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    groups = weight.to(torch.float32).view(*scales.shape, -1)
    product: Tensor = x.float() @ (groups * scales.float()[:, :, None]).flatten(1).T
    return (product if bias is None else product + bias.float()).to(x.dtype)
