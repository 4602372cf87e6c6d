"""AWQ and GPTQ checkpoints against a dequantization written here, number by number."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.unsupported import UnsupportedModel
from tests.unit.engine.checkpoints import edit_json, save_checkpoint
from tests.unit.engine.forward import CPU, logits_by_chunks

GROUP = 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each 4 bits, from the lowest
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def _word(codes: list[int]) -> int:
    word = sum(code << 4 * i for i, code in enumerate(codes))
    return word - (1 << 32) if word >= 1 << 31 else word


def _packed_along_outputs(codes: Tensor, order: list[int]) -> Tensor:
    """[R, O] -> [R, O / 8] int32"""
    rows = [[_word([row[8 * w + o] for o in order]) for w in range(len(row) // 8)] for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def _pack(method: str, num_outputs: int, num_inputs: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors as the checkpoint has them, and the weight [O, I] that they stand for."""
    num_groups = -(-num_inputs // GROUP)
    codes = torch.randint(0, 16, (num_inputs, num_outputs))
    zeros = torch.randint(1, 16, (num_groups, num_outputs))
    scales = (torch.rand(num_groups, num_outputs) * 0.05 + 0.01).half()
    weight = torch.empty(num_outputs, num_inputs)
    for i in range(num_inputs):
        weight[:, i] = (codes[i] - zeros[i // GROUP]).float() * scales[i // GROUP].float()
    if method == "awq":
        words, zero_words = _packed_along_outputs(codes, AWQ_ORDER), _packed_along_outputs(zeros, AWQ_ORDER)
        return {"qweight": words, "qzeros": zero_words, "scales": scales}, weight
    natural = list(range(8))
    packed = {
        "qweight": _packed_along_outputs(codes.T, natural).T.contiguous(),
        "qzeros": _packed_along_outputs(zeros - int(method == "gptq"), natural),
        "scales": scales,
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // GROUP,
    }
    return packed, weight


def _said(method: str) -> dict[str, Any]:
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": method}


def _save_both(directory: Path, method: str) -> tuple[Path, Path]:
    """The same model twice: packed, and with the weights that the packed ones stand for."""
    plain, packed = directory / "plain", directory / "packed"
    for path in (plain, packed):
        save_checkpoint(path, "llama")
    tensors = load_file(plain / "model.safetensors")
    packed_tensors = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, tensors[name] = _pack(method, *tensors[name].shape)
        del packed_tensors[name]
        packed_tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, plain / "model.safetensors")
    save_file(packed_tensors, packed / "model.safetensors")
    edit_json(packed / "config.json", quantization_config=_said(method))
    return plain, packed


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq_v2"])
def test_logits_are_those_of_the_weights_it_stands_for(tmp_path: Path, method: str) -> None:
    plain, packed = _save_both(tmp_path, method)
    for sizes in ([len(TOKENS)], [1] * len(TOKENS)):
        torch.testing.assert_close(
            logits_by_chunks(packed, TOKENS, sizes), logits_by_chunks(plain, TOKENS, sizes), rtol=1e-4, atol=1e-4
        )


def test_in_other_dtypes_the_weights_are_made_whole(tmp_path: Path) -> None:
    _, packed = _save_both(tmp_path, "awq")
    load_model(packed, read_model_config(packed), torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "of 8 bits"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"version": "gemv"}, "'gemv'"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": 32}, "were expected"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _, packed = _save_both(tmp_path, "awq")
    edit_json(packed / "config.json", quantization_config=_said("awq") | change)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(packed, read_model_config(packed), torch.float32, CPU)


def test_groups_of_scattered_inputs_are_refused(tmp_path: Path) -> None:
    _, packed = _save_both(tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="desc_act"):
        load_model(packed, read_model_config(packed), torch.float32, CPU)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    _, packed = _save_both(tmp_path, "awq")
    config = replace(read_model_config(packed), quantization="int8")
    with pytest.raises(UnsupportedModel, match="already"):
        load_model(packed, config, torch.float32, CPU)
