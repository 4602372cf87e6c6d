"""Two ranks on two GPUs compute what one computes. Skipped where there are fewer."""

from pathlib import Path

import pytest
import torch

from kvasir.engine.blocks import BlockId
from kvasir.engine.tensor_parallel.device_cache import ShardedDeviceCache
from kvasir.kernels import backend
from tests.unit.engine.checkpoints import save_checkpoint
from tests.unit.engine.test_tensor_parallel import built, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_equal_to_one_gpu(tmp_path: Path, is_eager: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"wants two CUDA GPUs, and there are {torch.cuda.device_count()}")
    if backend.is_interpreted():
        pytest.skip("wants compiled kernels: TRITON_INTERPRET=0")
    save_checkpoint(tmp_path, "llama", head_dim=16)
    options = {"device": "cuda", "dtype": "float32", "enforce_eager": is_eager, "max_num_batched_tokens": 20}
    with built(tmp_path, 1, **options) as (engine, alone):
        tokens, logprobs = run(engine)
        first = bytes(alone.read(BlockId(0)))
    with built(tmp_path, 2, **options) as (engine, kv_cache):
        assert isinstance(kv_cache, ShardedDeviceCache)
        own_tokens, own_logprobs = run(engine)
        assert own_tokens == tokens
        assert own_logprobs == pytest.approx(logprobs, rel=1e-4, abs=1e-5)
        found, expected = (
            torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (kv_cache.read(BlockId(0)), first)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        kv_cache.write(BlockId(1), memoryview(first))
        assert bytes(kv_cache.read(BlockId(1))) == first
