"""Matrix product with a weight that stays the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvasir.kernels.integer_linear import integer_linear_reference
from kvasir.kernels.quantized import GroupedWeight, quantize
from kvasir.kernels.quantized_linear import quantize_weight, quantized_linear

if TYPE_CHECKING:
    from kvasir.kernels.cpu.integer_panels import IntegerPanels
    from kvasir.kernels.cpu.panels import Panels

# Shapes: T tokens  I inputs  O outputs

Quantization = Literal["none", "fp16", "int8", "int4", "w8a8_int8", "w4a8_int8", "int8-rows", "fp8"]

# The layer that gives logits suffers most, so it has 8 bits: as everybody's 4-bit models have it, or more.
_OF_HEAD: dict[Quantization, Quantization] = {"int4": "int8", "w4a8_int8": "w8a8_int8"}
_BITS: dict[Quantization, int] = {"int8": 8, "int4": 4, "w8a8_int8": 8, "w4a8_int8": 4}
ON_CPU: frozenset[Quantization] = frozenset({"fp16", *_BITS})

_quantization: ContextVar[Quantization] = ContextVar("quantization", default="none")


@contextmanager
def quantizing(how: Quantization) -> Iterator[None]:
    """How each PackedLinear that is made within keeps its weight: as it is, in 16 bits, or in 8 or 4 with scales.

    On a CPU: fp16; int8 and int4, a scale for each group of inputs; w8a8_int8 and w4a8_int8, the same weights, and
    inputs in 8 bits too. On a GPU: int8-rows and fp8, a scale for each output.
    """
    token = _quantization.set(how)
    try:
        yield
    finally:
        _quantization.reset(token)


class PackedLinear:
    """x [T, I] -> x @ weight.T + bias [T, O], for weight [O, I] and bias [O]. Sums are in x's dtype.

    On a CPU, weights for float32 are kept as the panels that the compiled loops read, and nowhere else.
    """

    def __init__(
        self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, *, is_exact: bool = False,
        is_head: bool = False,
    ) -> None:  # fmt: skip
        """is_exact: never quantized here, whatever `quantizing` says. is_head: no less than 8 bits."""
        self.num_outputs = weight.shape[0]
        self._bias = bias
        self._plain: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None
        how = "none" if is_exact else _quantization.get()
        how = _OF_HEAD.get(how, how) if is_head else how
        if isinstance(weight, Tensor) and not is_packable(weight):
            if how in ("int8-rows", "fp8"):
                self._scaled = quantize_weight(weight, torch.int8 if how == "int8-rows" else torch.float8_e4m3fn)
            else:
                self._plain = weight
            return
        self._panels = _packed(weight, how)

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain is not None:
            return torch.nn.functional.linear(x, self._plain, self._bias)
        if self._scaled is not None:
            return quantized_linear(x, *self._scaled, self._bias)
        if isinstance(self._panels, GroupedWeight):
            return integer_linear_reference(x, self._panels, self._bias)
        out = x.new_empty(len(x), self.num_outputs)
        self._panels.multiply(x, self._bias, out)
        return out


def _packed(weight: Tensor | GroupedWeight, how: Quantization) -> "Panels | IntegerPanels | GroupedWeight":
    """As it is where a product of integers cannot read float16 scales."""
    from kvasir.kernels.cpu.integer_panels import pack_integers
    from kvasir.kernels.cpu.panel_tile import CONVERTS_FLOAT16
    from kvasir.kernels.cpu.panels import pack, pack_grouped

    if isinstance(weight, Tensor) and how in _BITS:
        weight = quantize(weight, _BITS[how])
    if isinstance(weight, GroupedWeight) and how in ("w8a8_int8", "w4a8_int8"):
        return pack_integers(weight) if CONVERTS_FLOAT16 else weight
    if isinstance(weight, GroupedWeight) and not CONVERTS_FLOAT16:
        weight = weight.dequantized()
    if isinstance(weight, GroupedWeight):
        return pack_grouped(weight)
    if how != "fp16":
        return pack(weight, torch.float32)
    halves = weight.half()
    if not bool(halves.isfinite().all()):
        raise ValueError("the weights are too large for fp16")
    return pack(halves.float(), torch.float16 if CONVERTS_FLOAT16 else torch.float32)


def is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.T
    return product if bias is None else product + bias
