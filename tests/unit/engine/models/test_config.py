"""What config files say, and what is refused because we would get it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.engine.models import read_model_config
from kvasir.engine.models.config import eos_token_ids
from kvasir.engine.models.loader import choose_dtype, load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.models.unsupported import UnsupportedModel
from tests.unit.engine.checkpoints import edit_json, save_checkpoint

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def write_config(directory: Path, **changes: Any) -> None:
    edit_json(directory / "config.json", **(LLAMA | changes))


def test_a_llama_2_config_of_old(tmp_path: Path) -> None:
    write_config(tmp_path, torch_dtype="float16", rope_scaling=None)
    config = read_model_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.checkpoint_dtype) == (4, 16, "float16")
    assert (config.ropes[0].kind, config.max_position, config.windows) == ("default", 4096, (0, 0))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 1024} | LONGROPE, 4096),
        ({"type": "su", "original_max_position_embeddings": 1024} | LONGROPE, 4096),
        ({"rope_type": "default"}, 4096),
    ],
)  # fmt: skip
def test_the_longest_sequence_follows_from_the_rope_scaling(
    tmp_path: Path, scaling: dict[str, Any], longest: int
) -> None:
    write_config(tmp_path, rope_scaling=scaling)
    assert read_model_config(tmp_path).max_position == longest


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "'foo'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.45}}, "7 of 16 dimensions"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "24 of 16 dimensions"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"hidden_act": "gelu"}, "'gelu'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=name):
        read_model_config(tmp_path)


def test_angles_that_depend_on_the_length_are_chosen_once(tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 1024} | LONGROPE
    write_config(tmp_path, rope_scaling=scaling)
    config = read_model_config(tmp_path)
    short, long, longer = (config.for_length(length) for length in (1024, 1025, 4096))
    assert short == config
    assert long == longer != short
    write_config(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    config = read_model_config(tmp_path)
    assert (config.max_position, config.longest) == (4096, 16384)
    assert config.for_length(4096) == config
    assert config.for_length(5000) != config.for_length(5001)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        rope_tables(config.ropes, 16, 4097)


def test_unknown_layer_type_is_refused_by_name(tmp_path: Path) -> None:
    layers = ["full_attention", "chunked_attention"]
    write_config(tmp_path, architectures=["Qwen3ForCausalLM"], layer_types=layers)
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        read_model_config(tmp_path)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="kvasir model convert"):
        read_model_config(tmp_path / "model.gguf")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight"):
        load_model(tmp_path, read_model_config(tmp_path), torch.float32, CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors"):
        load_model(tmp_path, read_model_config(tmp_path), torch.float32, CPU)


def test_dtype(tmp_path: Path) -> None:
    write_config(tmp_path, torch_dtype="bfloat16")
    config = read_model_config(tmp_path)
    assert choose_dtype("auto", config, CPU) is torch.float32
    assert choose_dtype("auto", config, torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("float16", config, CPU) is torch.float16
    with pytest.raises(UnsupportedModel, match="'int8'"):
        choose_dtype("int8", config, CPU)


def test_a_model_that_float16_cannot_hold_gets_bfloat16_or_is_refused(tmp_path: Path) -> None:
    """A model made for bfloat16 once gave empty answers in float16: its activations were infinite."""
    write_config(tmp_path, architectures=["Gemma2ForCausalLM"], torch_dtype="float16", hidden_act="gelu_pytorch_tanh")
    config = read_model_config(tmp_path)
    assert choose_dtype("auto", config, torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("auto", config, CPU) is torch.float32
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM overflows in float16"):
        choose_dtype("float16", config, CPU)


def test_the_rope_of_a_gemma_3_of_old(tmp_path: Path) -> None:
    """Two bases beside each other; the scaling is of the layers that see everything."""
    write_config(
        tmp_path, architectures=["Gemma3ForCausalLM"], hidden_activation="gelu_pytorch_tanh", num_hidden_layers=7,
        head_dim=16, rope_theta=1000000.0, rope_local_base_freq=20000.0, sliding_window=512, query_pre_attn_scalar=256,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    config = read_model_config(tmp_path)
    full, sliding = config.ropes
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8)
    assert (sliding.kind, sliding.theta) == ("default", 2e4)
    assert config.rope_of_layer == (1, 1, 1, 1, 1, 0, 1)
    assert config.windows == (512, 512, 512, 512, 512, 0, 512)
    assert config.max_position == 4096
    assert config.tie_word_embeddings
    assert config.attention_scale == 1 / 16


def tokenizer(directory: Path) -> None:
    added = [{"id": 40, "content": "<|end|>"}, {"id": 41, "content": "<|other|>"}]
    content = {"added_tokens": added, "model": {"type": "BPE", "vocab": {"</s>": 42, "a": 43}}}
    (directory / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("generation", "eos_token", "expected"),
    [
        (10, "<|end|>", {7, 10, 40}),
        ([10, 11], "</s>", {7, 10, 11, 42}),
        ([7], {"content": "<|end|>", "special": True}, {7, 40}),
        (None, None, {7}),
        (None, "not in the vocabulary", {7}),
    ],
)
def test_whatever_is_called_the_end_anywhere_ends(
    tmp_path: Path, generation: object, eos_token: object, expected: set[int]
) -> None:
    """A model was seen to run on past its turn because one of the files names an end that the others do not."""
    write_config(tmp_path, eos_token_id=7)
    edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=eos_token)
    tokenizer(tmp_path)
    assert eos_token_ids(tmp_path) == expected


def test_no_end_is_named_anywhere(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert eos_token_ids(tmp_path) == frozenset()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is torn, or no safetensors file"):
        load_model(tmp_path, config, torch.float32, CPU)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config\.json is no JSON"):
        read_model_config(tmp_path)
