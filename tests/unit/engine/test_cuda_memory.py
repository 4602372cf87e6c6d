from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvasir.engine.cuda_memory import MemoryProfile, NoRoomForKV, kv_budget_bytes, largest_decode, largest_step
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from tests.unit.engine.checkpoints import save_checkpoint
from tests.unit.engine.forward import CPU

PROFILE = MemoryProfile(total_bytes=1000, free_bytes=600, reserved_bytes=350, peak_bytes=400, graph_bytes=20)


def test_budget() -> None:
    assert kv_budget_bytes(PROFILE, 0.9) == 900 - 50 - 400 - 20
    assert kv_budget_bytes(PROFILE, 0.5) == 500 - 50 - 400 - 20
    assert kv_budget_bytes(replace(PROFILE, free_bytes=700), 1.0) == 1000 - 400 - 20, "torch holds more than is in use"
    with pytest.raises(NoRoomForKV, match="weights and the largest step take 400"):
        kv_budget_bytes(PROFILE, 0.47)


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "max_len", "expected"),
    [(512, 4, 1000, [128] * 4), (10, 4, 1000, [3, 3, 2, 2]), (3, 64, 1000, [1, 1, 1]), (512, 2, 40, [40, 40])],
)
def test_the_largest_step(max_tokens: int, max_seqs: int, max_len: int, expected: list[int]) -> None:
    chunks = largest_step(max_tokens, max_seqs, max_len, 16).chunks
    assert [chunk.num_tokens for chunk in chunks] == expected
    assert all(chunk.samples and len(chunk.request.block_table) * 16 >= chunk.num_tokens for chunk in chunks)
    assert chunks[0].scored or max(expected) == 1
    assert len(largest_decode(max_tokens, max_seqs, max_len, 16).chunks) == len(expected)


def test_both_steps_run_in_one_block(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    config = read_model_config(tmp_path)
    kv_cache = KVCache(kv_layout(config, 4, torch.float32), 1, CPU)
    runner = ModelRunner(load_model(tmp_path, config, torch.float32, CPU), kv_cache, 64)
    sampled = runner.execute(largest_step(40, 3, 64, 4))
    assert [len(one.token_ids) for one in sampled.values()] == [1, 1, 1]
    assert len(runner.execute(largest_decode(40, 3, 64, 4))) == 3
    assert len(runner.execute(largest_decode(40, 3, 64, 4, tokens_each=5))) == 3


def test_no_sequence_is_longer_than_one_may_be(tmp_path: Path) -> None:
    """With more drafts than that, their positions had no angles."""
    save_checkpoint(tmp_path)
    config = read_model_config(tmp_path)
    kv_cache = KVCache(kv_layout(config, 4, torch.float32), 1, CPU)
    runner = ModelRunner(load_model(tmp_path, config, torch.float32, CPU), kv_cache, 3)
    for plan in (largest_step(40, 3, 3, 4), largest_decode(40, 3, 3, 4, tokens_each=5)):
        assert len(runner.execute(plan)) == 3
