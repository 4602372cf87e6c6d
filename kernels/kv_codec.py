"""Conversions of a KV block's values between dtypes, on buffers in host memory.

Rounding is to nearest, ties to even. To float16, finite values saturate at +-65504; infinities and NaN stay what they
are, so that a forward pass that went wrong is still seen by whoever reads them.
"""

import torch
from torch import Tensor

FLOAT16_MAX = 65504.0


def convert(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values: any floating dtype -> the same values in `dtype`; the tensor itself if it has that dtype already."""
    if values.dtype == dtype:
        return values
    return convert_reference(values, dtype)


def convert_reference(values: Tensor, dtype: torch.dtype) -> Tensor:
    precise = values.float()
    if dtype == torch.float16:
        limited = precise.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        precise = torch.where(precise.isinf(), precise, limited)
    return precise.to(dtype)
