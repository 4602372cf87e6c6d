"""Weights as the compiled products read them: panels of outputs, input by input."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.kernels.cpu import huge_pages, products, threads
from kvasir.kernels.cpu.compiling import Loop
from kvasir.kernels.cpu.panel_tile import PANEL
from kvasir.kernels.quantized import GroupedWeight

# Shapes: T tokens  I inputs  O outputs  P panels = ceil(O / PANEL)  G groups of inputs


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    num_outputs: int
    num_inputs: int
    group_size: int  # inputs that share scales; all of them where there are none
    weights: Tensor  # [P, I, PANEL] float32, float16 or int8; [P, I, PANEL / 2] uint8, two codes a byte
    scales: Tensor  # [P, bytes] uint8: of each group PANEL float16 scales, and as many zeros for 4 bits

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [T, I] float32 -> out [T, O]"""
        assert x.is_contiguous(), "the loop reads rows of I"
        num_panels = len(self.weights)
        threads.launch(
            _LOOPS[self.weights.dtype], num_panels,
            len(x), self.num_inputs, self.num_outputs, x.data_ptr(),
            self.weights.data_ptr(), num_panels, self.weights.stride(0), self.scales.data_ptr(), self.scales.stride(0),
            self.group_size, 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        )  # fmt: skip


_LOOPS: dict[torch.dtype, Loop] = {
    torch.float32: products.multiply_float32,
    torch.float16: products.multiply_float16,
    torch.int8: products.multiply_int8,
    torch.uint8: products.multiply_int4,
}


def pack(weight: Tensor, dtype: torch.dtype) -> Panels:
    """weight [O, I] float32 -> panels of float32 or float16"""
    num_outputs, num_inputs = weight.shape
    panels = kept(by_panel(weight.to(dtype)))
    return Panels(num_outputs, num_inputs, num_inputs, panels, torch.empty(len(panels), 0, dtype=torch.uint8))


def pack_grouped(weight: GroupedWeight) -> Panels:
    num_outputs, num_inputs = weight.shape
    codes = by_panel(weight.codes)
    if weight.bits == 4:
        codes = codes[..., : PANEL // 2] | codes[..., PANEL // 2 :] << 4
    parts = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
    scales = torch.stack([by_panel(part) for part in parts], dim=2)  # [P, G, 1 or 2, PANEL]
    as_bytes = kept(scales).view(len(scales), -1).view(torch.uint8)
    return Panels(num_outputs, num_inputs, weight.group_size, kept(codes), as_bytes)


def by_panel(matrix: Tensor) -> Tensor:
    """[O, I] -> [P, I, PANEL], with zeros for the outputs that the last panel lacks"""
    num_outputs, num_inputs = matrix.shape
    if num_outputs % PANEL:
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -num_outputs % PANEL))
    return matrix.view(-1, PANEL, num_inputs).transpose(1, 2)


def kept(tensor: Tensor) -> Tensor:
    return huge_pages.empty(tensor.shape, tensor.dtype).copy_(tensor)
