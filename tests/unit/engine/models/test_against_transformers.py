"""Logits of every architecture and every rope type, against transformers, on tiny random checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from tests.unit.engine.checkpoints import VOCAB, edit_json, reference_logits, save_checkpoint
from tests.unit.engine.forward import CPU, generate, greedy_request, logits_by_chunks

LONG = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(150)]  # past the 64 positions of the checkpoints
CHUNKS = [33, 1, 1, 40, 75]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn"} | YARN,
    "yarn with its options": {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3} | YARN,
    "llama3": {"rope_type": "llama3"} | LLAMA3,
}


def check(directory: Path, model: Any, token_ids: list[int], chunk_sizes: list[int]) -> None:
    expected = reference_logits(model, token_ids)
    got = logits_by_chunks(directory, token_ids, [size for size in chunk_sizes if size > 0])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def check_greedy(directory: Path, model: Any) -> None:
    """Two requests at once, their prompts in chunks."""
    config = read_model_config(directory).for_length(64)
    runner = ModelRunner(
        load_model(directory, config, torch.float32, CPU), KVCache(kv_layout(config, 4, torch.float32), 20, CPU), 64
    )
    requests = [greedy_request(f"r{i}", LONG[i : 14 + 9 * i], 8, 10 * i, 4) for i in range(2)]
    generate(runner, requests, chunk_size=9)
    for request in requests:
        start, tokens = len(request.prompt_token_ids), request.output_token_ids
        best = reference_logits(model, request.prompt_token_ids + tokens)[start - 1 : -1].topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for token, expected, gap in zip(tokens, best.indices[:, 0].tolist(), gaps, strict=True):
            assert token == expected or gap < 1e-4, "where the two best are that close, rounding may choose either"


@pytest.mark.parametrize("rope", ROPES)
def test_llama_with_each_rope_type(tmp_path: Path, rope: str) -> None:
    model = save_checkpoint(tmp_path, rope_parameters=ROPES[rope] | {"rope_theta": 1000.0})
    check(tmp_path, model, LONG, CHUNKS)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_old_configs_keep_scaling_beside_theta(tmp_path: Path, rope: str, key: str) -> None:
    """`rope_theta` and `rope_scaling`, with the older key `type` too; half-read, scaling would be lost in silence."""
    model = save_checkpoint(tmp_path, rope_parameters=ROPES[rope] | {"rope_theta": 1000.0})
    scaling = {name: value for name, value in ROPES[rope].items() if name != "rope_type"} | {key: rope}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=1000.0, rope_scaling=scaling)
    check(tmp_path, model, LONG, CHUNKS)


@pytest.mark.parametrize("length", [11, 64, 150])
def test_rope_that_depends_on_the_length(tmp_path: Path, length: int) -> None:
    """Up to the original length, and past it where longer sequences are to be served."""
    model = save_checkpoint(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0})
    check(tmp_path, model, LONG[:length], [10, 1, length - 11])


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("length", [11, 64, 150])
def test_longrope(tmp_path: Path, length: int, key: str) -> None:
    factors = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.0 + i for i in range(6)]}
    rope = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75} | factors
    model = save_checkpoint(
        tmp_path, "phi3", rope_parameters=rope, hidden_size=64,
        max_position_embeddings=256, original_max_position_embeddings=64,
    )  # fmt: skip
    if key == "type":  # as the first of these models write it
        edit_json(
            tmp_path / "config.json", rope_parameters=None, rope_theta=1000.0, partial_rotary_factor=0.75,
            rope_scaling={"type": "su"} | factors,
        )  # fmt: skip
    check(tmp_path, model, LONG[:length], [10, 1, length - 11])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
        ("mistral", {"sliding_window": 20}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}),
        ("gemma3", {"sliding_window": 9, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2}),
        ("gemma3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}),
        ("phi3", {"hidden_size": 64}),
        ("phi3", {"hidden_size": 64, "sliding_window": 9, "rope_parameters": PARTIAL}),
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 9}),
        ("qwen3_moe", MOE | {"norm_topk_prob": True}),
        ("qwen3_moe", MOE | {"mlp_only_layers": [1]}),
        ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    ],
)
def test_each_architecture(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model = save_checkpoint(tmp_path, kind, **options)
    check(tmp_path, model, LONG[:64], [10, 1, 53])
    check_greedy(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_are_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_checkpoint(tmp_path, dtype=dtype)
    check(tmp_path, model, LONG[:40], [40])


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path, model, LONG[:40], [40])
