"""A model whose products are of integers: its output does not depend on how the work is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.engine.identity import kv_identity
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.linear import Quantization
from tests.unit.engine.checkpoints import VOCAB, save_checkpoint
from tests.unit.engine.cuts import BLOCK_SIZE, Cuts
from tests.unit.engine.forward import CPU, generate, greedy_request

WAYS: tuple[Quantization, ...] = ("w8a8_int8", "w4a8_int8")
PROMPTS = [[(7 * i + 5 * length) % VOCAB for i in range(length)] for length in (3, 17, 31, 40)]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory)
    return directory


def answers(checkpoint: Path, how: Quantization, groups: list[list[list[int]]], chunk_size: int) -> list[list[int]]:
    """Of all prompts; those of a group are in the same steps."""
    config = replace(read_model_config(checkpoint), quantization=how)
    kv_cache = KVCache(kv_layout(config, 4, torch.float32), 64, CPU)
    runner = ModelRunner(load_model(checkpoint, config, torch.float32, CPU), kv_cache, 64)
    found = []
    for group in groups:
        requests = [greedy_request(str(i), prompt, NUM_TOKENS, 16 * i, 4) for i, prompt in enumerate(group)]
        generate(runner, requests, chunk_size)
        found += [request.output_token_ids for request in requests]
    return found


@pytest.mark.parametrize("how", WAYS)
def test_batches_and_chunks_do_not_change_answers(checkpoint: Path, how: Quantization) -> None:
    alone = answers(checkpoint, how, [[prompt] for prompt in PROMPTS], 64)
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert alone != answers(checkpoint, "none", [[prompt] for prompt in PROMPTS], 64), "the integers are used"
    for chunk_size in (64, 7, 1):
        assert answers(checkpoint, how, [PROMPTS], chunk_size) == alone


LONG = [(7 * i * i + 5) % VOCAB for i in range(300)]  # three tiles of keys
CHUNKS = ([7], [16], [64], [13, 100, 29], [299, 1], [1])
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}),
    ("gemma2", {"sliding_window": 100, "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 5.0}),
)


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("kind", "options"), KINDS)
@torch.inference_mode()
def test_logits_are_the_same_to_the_last_bit_however_the_work_is_cut(
    kind: str, options: dict[str, Any], how: Quantization, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, kind, max_position_embeddings=320, **options)
    check_cuts(Cuts(tmp_path, how, LONG, num_others=3))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
@torch.inference_mode()
def test_so_they_are_with_keys_and_values_in_fewer_bytes(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, max_position_embeddings=320)
    check_cuts(Cuts(tmp_path, "w8a8_int8", LONG, num_others=3, kv_dtype=kv_dtype))


@pytest.mark.parametrize("how", ["w8a8_int8", pytest.param("w4a8_int8", marks=pytest.mark.full)])
@torch.inference_mode()
def test_so_they_are_of_the_built_in_model(how: Quantization, model_dir: Path) -> None:
    tokens = [(7919 * i * i + 31) % 49152 for i in range(150)]
    check_cuts(Cuts(model_dir, how, tokens, num_others=3), chunks=([1], [7], [64], [129]))


def check_cuts(cuts: Cuts, chunks: Sequence[Sequence[int]] = CHUNKS) -> None:
    torch.set_num_threads(2)
    whole = cuts.logits([1000])
    assert whole.isfinite().all()
    torch.set_num_threads(1)
    assert torch.equal(cuts.logits([1000]), whole)
    for sizes in chunks:
        assert torch.equal(cuts.logits(sizes), whole)
        assert torch.equal(cuts.logits(sizes, beside=3), whole)
    hit = 4 * BLOCK_SIZE  # of the prefix cache
    for size in (1, 16, 1000):
        assert torch.equal(cuts.logits([size], start=hit, beside=1), whole[hit:])
    cuts.logits([32])
    cuts.move_to_spare(4)
    for size in (1, 1000):
        assert torch.equal(cuts.logits([size], start=hit, spare=True), whole[hit:])


def test_keys_and_values_are_not_those_of_weights_alone(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    layout = kv_layout(config, 16, torch.float32)
    ways: tuple[Quantization, ...] = ("none", "int8", "int4", *WAYS)
    assert len({kv_identity(checkpoint, replace(config, quantization=how), layout) for how in ways}) == len(ways)


@pytest.mark.parametrize("how", WAYS)
def test_it_wants_float32(checkpoint: Path, how: Quantization) -> None:
    with pytest.raises(UnsupportedModel, match="wants a CPU and float32"):
        load_model(checkpoint, replace(read_model_config(checkpoint), quantization=how), torch.bfloat16, CPU)
