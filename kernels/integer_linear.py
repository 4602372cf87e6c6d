"""Matrix product of activations and weights that are both integers: W8A8 and W4A8."""

import torch
from torch import Tensor

from kvasir.kernels.kv_codec import quantize_reference
from kvasir.kernels.quantized import GROUP_SIZE, GroupedWeight

# Shapes: T tokens  I inputs  O outputs  G groups of GROUP_SIZE inputs


def integer_linear_reference(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, I] float32 -> about x @ weight.T + bias, [T, O]. Groups are of GROUP_SIZE inputs.

    Each group of each token becomes int8 with a scale of its own, as a row of an int8 KV cache does. Within a group,
    products are summed as integers; what groups give is added up in float32, in their order, and nothing is fused.
    So a row comes out the same, to the last bit, whatever else is in the batch, and on every machine.
    """
    num_tokens, num_outputs = len(x), len(weight.codes)
    rest = -x.shape[1] % GROUP_SIZE
    groups = torch.nn.functional.pad(x, (0, rest)).view(-1, GROUP_SIZE)
    x_scales, x_codes = quantize_reference(groups)
    x_scales, x_codes = x_scales.view(num_tokens, -1), x_codes.view(num_tokens, -1, GROUP_SIZE).float()
    codes = torch.nn.functional.pad(weight.codes, (0, rest)).view(num_outputs, -1, GROUP_SIZE).float()
    scales = weight.scales.float()
    out = x.new_zeros(num_tokens, num_outputs)
    for g in range(scales.shape[1]):
        sums = x_codes[:, g] @ codes[:, g].T  # exact: integers below 2 ** 24
        if weight.zeros is not None:
            sums -= x_codes[:, g].sum(-1)[:, None] * weight.zeros[:, g].float()
        out += sums * (x_scales[:, g, None] * scales[:, g])
    return out if bias is None else out + bias
