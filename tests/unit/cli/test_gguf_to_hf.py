"""A GGUF file becomes a model directory: every weight arrives, and what is unknown is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from kvasir.cli.gguf_fields import shortest, tensor_name
from kvasir.cli.gguf_smollm2 import _LAYER_TENSOR_NAMES, unpermute
from kvasir.cli.gguf_to_hf import convert
from tests.unit.cli.tiny_gguf import permute, tiny_weights, write_tiny_gguf


def test_tensors_get_their_hugging_face_names() -> None:
    assert tensor_name("blk.17.attn_output.weight", _LAYER_TENSOR_NAMES) == "model.layers.17.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match=r"output\.weight"):
        tensor_name("output.weight", _LAYER_TENSOR_NAMES)  # an untied head


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    assert not np.array_equal(permute(weight, 2), weight)
    assert np.array_equal(unpermute(permute(weight, 2), 2), weight)


def test_float32_fields_become_the_numbers_that_were_meant() -> None:
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(float(np.float32(100_000.0))) == 100_000.0


def test_every_weight_arrives(tmp_path: Path) -> None:
    shares: list[float] = []
    convert(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path, shares.append)
    converted, expected = load_file(tmp_path / "model.safetensors"), tiny_weights()
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        tolerance = 0.02 if "embed_tokens" in name else 0.0  # 8 bits a weight
        np.testing.assert_allclose(converted[name], weight, atol=tolerance, rtol=0)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda writer: writer.add_tensor("output.weight", np.zeros((2, 2), np.float32)), "output.weight"),
        (lambda writer: writer.add_float32("llama.rope.scaling.factor", 2.0), "llama.rope.scaling.factor"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, edit: Callable[[GGUFWriter], None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        convert(write_tiny_gguf(tmp_path / "tiny.gguf", edit), tmp_path, lambda done: None)
