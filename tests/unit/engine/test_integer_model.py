"""A model whose products are of integers: its output does not depend on how the work is cut."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir.engine.identity import kv_identity
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.config import UnsupportedModel
from kvasir.engine.models.loader import load_model
from kvasir.kernels.linear import Quantization
from tests.unit.engine.checkpoints import VOCAB, save_checkpoint
from tests.unit.engine.forward import CPU, generate, greedy_request, logits_by_chunks

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


@pytest.mark.parametrize("how", WAYS)
def test_a_prompt_has_the_same_logits_in_any_chunks(checkpoint: Path, how: Quantization,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(
        "tests.unit.engine.forward.read_model_config",
        lambda directory: replace(read_model_config(directory), quantization=how),
    )

    def logits(sizes: list[int]) -> Tensor:
        return logits_by_chunks(checkpoint, PROMPTS[3], sizes)

    whole = logits([40])
    for sizes in ([1] * 40, [13, 13, 14], [39, 1]):
        # Attention may add up in another order, and then a code here and there is another.
        assert float((logits(sizes) - whole).abs().max() / whole.abs().max()) < 0.02


def test_keys_and_values_are_not_those_of_weights_alone(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    layout = kv_layout(config, 16, torch.float32)
    ways: tuple[Quantization, ...] = ("none", "int8", "int4", *WAYS)
    assert len({kv_identity(checkpoint, replace(config, quantization=how), layout) for how in ways}) == len(ways)


@pytest.mark.parametrize("how", WAYS)
def test_it_wants_float32(checkpoint: Path, how: Quantization) -> None:
    with pytest.raises(UnsupportedModel, match="wants a CPU and float32"):
        load_model(checkpoint, replace(read_model_config(checkpoint), quantization=how), torch.bfloat16, CPU)
