"""Weights as the compiled products of integers read them: panels of outputs, a few inputs at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.kernels.cpu import integer_products, threads
from kvasir.kernels.cpu.integer_block import BLOCK, BLOCK_WORDS, HAS_BYTE_PRODUCTS, STEP
from kvasir.kernels.cpu.panel_tile import PANEL
from kvasir.kernels.cpu.panels import by_panel, kept
from kvasir.kernels.quantized import GroupedWeight

# Shapes: T tokens  I inputs  O outputs  P panels = ceil(O / PANEL)  G blocks of inputs = ceil(I / BLOCK)


@dataclass(frozen=True, slots=True, eq=False)
class IntegerPanels:
    num_outputs: int
    num_inputs: int
    codes: Tensor  # [P, bytes of a panel] int8, or uint8: two codes of 4 bits
    scales: Tensor  # [P, bytes] uint8: of each block PANEL float16 scales, and as many zeros for 4 bits

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [T, I] float32 -> out [T, O], as `integer_linear_reference` has it"""
        assert x.is_contiguous(), "the loop reads rows of I"
        num_tokens, num_panels, num_blocks = len(x), len(self.codes), -(-self.num_inputs // BLOCK)
        words = torch.empty(num_tokens, num_blocks, BLOCK_WORDS, dtype=torch.int32)
        threads.launch(
            integer_products.quantize, num_tokens,
            num_tokens, self.num_inputs, num_blocks, x.data_ptr(), words.data_ptr(),
        )  # fmt: skip
        is_8_bits = self.codes.dtype == torch.int8
        threads.launch(
            integer_products.multiply_8_bits if is_8_bits else integer_products.multiply_4_bits, num_panels,
            num_tokens, num_blocks, self.num_outputs, words.data_ptr(), self.codes.data_ptr(), num_panels,
            self.codes.stride(0), self.scales.data_ptr(), self.scales.stride(0),
            0 if bias is None else bias.data_ptr(), out.data_ptr(),
        )  # fmt: skip


def pack_integers(weight: GroupedWeight) -> IntegerPanels:
    """weight: in groups of BLOCK"""
    assert weight.group_size == BLOCK
    num_outputs, num_inputs = weight.shape
    codes = by_panel(torch.nn.functional.pad(weight.codes, (0, -num_inputs % BLOCK)))  # [P, inputs, PANEL]
    codes = codes.view(len(codes), -1, STEP, PANEL).transpose(2, 3).flatten(2)  # [P, steps, PANEL * STEP]
    if weight.bits == 4:
        low, high = codes.chunk(2, dim=2)
        codes = low | high << 4
    elif HAS_BYTE_PRODUCTS:
        codes = codes ^ -128  # as uint8, they are more by 128
    parts = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
    scales = torch.stack([by_panel(part) for part in parts], dim=2)  # [P, G, 1 or 2, PANEL]
    return IntegerPanels(num_outputs, num_inputs, kept(codes.flatten(1)), kept(scales.flatten(1)).view(torch.uint8))
