"""Weights of linear layers in 8 or 4 bits: groups of inputs share a scale (and a zero) for each output."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: O outputs  I inputs  G groups of inputs = ceil(I / group_size)

GROUP_SIZE = 32  # where we choose: blocks as those of q8_0 and q4_1
_LARGEST_ZERO = 65000.0  # a float16 holds it, with a scale that was rounded, too
_SMALLEST_SCALE = 2.0**-14  # a float16 keeps 11 bits down to here; weights that small make no difference


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """weight[o, i] = (codes[o, i] - zeros[o, i // group_size]) * scales[o, i // group_size]"""

    bits: int  # 8: codes -127 .. 127, no zeros; 4: codes 0 .. 15
    group_size: int
    codes: Tensor  # [O, I] int8 or uint8
    scales: Tensor  # [O, G] float16
    zeros: Tensor | None = None  # [O, G] float16

    def __post_init__(self) -> None:
        num_groups = -(-self.codes.shape[1] // self.group_size)
        assert self.bits == (8 if self.zeros is None else 4)
        assert self.scales.shape == (len(self.codes), num_groups)
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: slice) -> "GroupedWeight":
        zeros = None if self.zeros is None else self.zeros[rows]
        return GroupedWeight(self.bits, self.group_size, self.codes[rows], self.scales[rows], zeros)

    def dequantized(self) -> Tensor:
        """[O, I] float32"""
        codes = self.codes.float()
        if self.zeros is not None:
            codes -= self._spread(self.zeros)
        return codes * self._spread(self.scales)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """[O, G] -> [O, I] float32"""
        return of_groups.float().repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Side by side: the outputs of the first, then those of the next."""
    first = weights[0]
    if any((each.bits, each.group_size) != (first.bits, first.group_size) for each in weights):
        raise ValueError("weights of different groups cannot be joined")
    zeros = [each.zeros for each in weights if each.zeros is not None]
    return GroupedWeight(
        first.bits, first.group_size, torch.cat([each.codes for each in weights]),
        torch.cat([each.scales for each in weights]), torch.cat(zeros) if zeros else None,
    )  # fmt: skip


def quantize(weight: Tensor, bits: int, group_size: int = GROUP_SIZE) -> GroupedWeight:
    """weight [O, I] float32 -> the nearest codes, for 8 bits on a grid around 0, for 4 from least to greatest"""
    num_outputs, num_inputs = weight.shape
    rest = -num_inputs % group_size
    if rest:  # the last group is short; what repeats its last weight changes neither end of it
        weight = torch.cat((weight, weight[:, -1:].expand(-1, rest)), dim=1)
    groups = weight.reshape(num_outputs, -1, group_size)
    least, greatest = groups.amin(-1), groups.amax(-1)
    zeros = None
    if bits == 8:
        scales = _scales(torch.maximum(-least, greatest) / 127)
        codes = (groups / scales.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    else:
        span, size = greatest - least, torch.maximum(-least, greatest)
        scales = _scales(torch.maximum(span / 15, size / _LARGEST_ZERO))
        zeros = (-least / scales.float()).half()
        codes = groups / scales.float()[..., None]
        codes = codes.add_(zeros.float()[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return GroupedWeight(bits, group_size, codes.view(num_outputs, -1)[:, :num_inputs], scales, zeros)


def _scales(wanted: Tensor) -> Tensor:
    if not bool((wanted < 65504).all()):
        raise ValueError("weights that are not finite, or too large, cannot be quantized")
    return wanted.clamp_min_(_SMALLEST_SCALE).half()
