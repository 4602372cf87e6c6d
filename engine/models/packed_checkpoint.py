"""Linear layers of quantized checkpoints: AWQ and GPTQ, 4 bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.quantized import GroupedWeight

# Shapes: O outputs  I inputs  G groups of inputs

_CODES_A_WORD = 8
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which 4 bits of a word each of its eight outputs has


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What config.json says of a checkpoint's quantization."""

    method: Literal["awq", "gptq"]
    group_size: int  # -1: all inputs are one group
    zeros_are_one_less: bool  # GPTQ's first format stores zero - 1

    def weight(self, name: str, tensor: Callable[[str], Tensor]) -> GroupedWeight:
        """name: of the layer; `tensor` gives those of the checkpoint. UnsupportedModel: it is not as it should be."""
        words, zeros, scales = (tensor(f"{name}.{part}") for part in ("qweight", "qzeros", "scales"))
        if words.dtype != torch.int32 or zeros.dtype != torch.int32:
            raise UnsupportedModel(f"{name}: codes are {words.dtype} and {zeros.dtype}, not int32")
        codes = _unpack(words, _AWQ_PLACES) if self.method == "awq" else _unpack(words.T, range(_CODES_A_WORD)).T
        num_inputs, num_outputs = codes.shape
        group_size = num_inputs if self.group_size == -1 else self.group_size
        unpacked_zeros = _unpack(zeros, _AWQ_PLACES if self.method == "awq" else range(_CODES_A_WORD))
        shape = (-(-num_inputs // group_size), num_outputs)
        if tuple(scales.shape) != shape or tuple(unpacked_zeros.shape) != shape:
            raise UnsupportedModel(f"{name}: scales {tuple(scales.shape)} where {shape} were expected")
        if not torch.equal(scales.half().to(scales.dtype), scales):
            raise UnsupportedModel(f"{name}: scales that float16 cannot hold")
        return GroupedWeight(
            bits=4,
            group_size=group_size,
            codes=codes.T.contiguous(),
            scales=scales.half().T.contiguous(),
            zeros=(unpacked_zeros + int(self.zeros_are_one_less)).half().T.contiguous(),
        )

    def check_order(self, name: str, group_of_input: Tensor) -> None:
        """UnsupportedModel: the groups are not inputs next to each other (desc_act)."""
        num_inputs = len(group_of_input)
        size = num_inputs if self.group_size == -1 else self.group_size
        if not torch.equal(group_of_input.long(), torch.arange(num_inputs) // size):
            raise UnsupportedModel(f"{name}: groups of inputs that are not next to each other (desc_act)")


def _unpack(words: Tensor, places: Any) -> Tensor:
    """[R, C] int32 -> [R, 8 C] uint8; places: where in a word its eight codes are"""
    codes = [(words >> 4 * place & 15).to(torch.uint8) for place in places]
    return torch.stack(codes, dim=-1).flatten(1)


def read_packing(raw: Mapping[str, Any]) -> Packing | None:
    """raw: config.json. None: the weights are plain. UnsupportedModel: they are packed in a way we do not know."""
    said = raw.get("quantization_config") or raw.get("compression_config")
    if not said:
        return None
    method = said.get("quant_method", "unnamed")
    if method not in ("awq", "gptq"):
        raise UnsupportedModel(f"quantized weights ({method}) are not supported; known are awq and gptq")
    bits = said.get("bits", said.get("w_bit"))
    if bits != 4:
        raise UnsupportedModel(f"{method} weights of {bits} bits are not supported; 4 are")
    group_size = said.get("group_size", said.get("q_group_size"))
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise UnsupportedModel(f"{method} weights with group_size {group_size!r}")
    kind = said.get("version", "gemm") if method == "awq" else said.get("checkpoint_format", "gptq")
    if str(kind).lower() not in ("gemm", "gptq", "gptq_v2"):
        raise UnsupportedModel(f"{method} weights in the form {kind!r} are not supported")
    is_first_format = method == "gptq" and str(kind).lower() == "gptq"
    return Packing(method=method, group_size=group_size, zeros_are_one_less=is_first_format)
