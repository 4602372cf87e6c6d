"""Two ranks, real processes, compute what one computes; what leaves the node is the same."""

import dataclasses
import inspect
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from kvasir.engine.batch import HostBatch, host_batch
from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.cuda_memory import NoRoomForKV
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.engine.step import Chunk, PromptLogprobs
from kvasir.engine.tensor_parallel import memory, worker, workers
from kvasir.engine.tensor_parallel.cache import ShardedKVCache
from kvasir.engine.tensor_parallel.device_cache import ShardedDeviceCache, arguments_in, written
from kvasir.engine.tensor_parallel.group import check_devices, device_of_rank
from kvasir.engine.tensor_parallel.messages import CaptureDecodes, MakeCache, read_command, write_command
from tests.unit.engine.checkpoints import save_checkpoint

MEMORY = 4 << 20
PROMPTS = [list(range(3, 33)), [7, 8, 9] * 12, [50]]
LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, total_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")


@contextmanager
def built(directory: Path, size: int, **settings: Any) -> Iterator[tuple[Engine, KVCache]]:
    threads = torch.get_num_threads()
    engine, kv_cache, _ = build_engine(
        EngineSettings(
            model=str(directory), kv_cache_memory=MEMORY, block_size=8, tensor_parallel_size=size, **settings
        )
    )
    try:
        yield engine, kv_cache
    finally:
        engine.close()
        torch.set_num_threads(threads)


def run(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Output tokens of greedy and seeded requests together, in chunks; logprobs of the first prompt."""
    requests = [
        Request(
            request_id=RequestId(f"{index}-{temperature}"),
            prompt_token_ids=list(prompt),
            cache_salt=str(index),
            sampling=SamplingParams(
                max_tokens=12, temperature=temperature, seed=3, prompt_logprobs=None if index else 0
            ),
        )
        for index, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 0.8)
    ]
    for request in requests:
        engine.submit(request)
    scores: list[PromptLogprobs] = []
    while engine.has_work:
        scores += engine.step().prompt_logprobs
    engine.check_invariants()
    logprobs = [position.entries[0][1] for one in scores for position in one.positions]
    return [request.output_token_ids for request in requests], logprobs


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("phi3", {"num_key_value_heads": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("gemma3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equal_to_one_rank(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, kind, **options)
    with built(tmp_path, 1, max_num_batched_tokens=20) as (engine, alone_cache):
        tokens, logprobs = run(engine)
    with built(tmp_path, 2, max_num_batched_tokens=20) as (engine, kv_cache):
        assert isinstance(kv_cache, ShardedKVCache)
        own_tokens, own_logprobs = run(engine)
        assert own_tokens == tokens
        assert own_logprobs == pytest.approx(logprobs, rel=1e-4, abs=1e-5)
        # A block that leaves the node is what one rank would have sent.
        first = engine_block(kv_cache, BlockId(0))
        torch.testing.assert_close(first, engine_block(alone_cache, BlockId(0)), rtol=1e-4, atol=1e-5)


def engine_block(kv_cache: KVCache, block: BlockId) -> torch.Tensor:
    return torch.frombuffer(bytearray(kv_cache.read(block)), dtype=torch.float32)


def test_blocks_are_whole_outside(tmp_path: Path) -> None:
    whole = KVCache(LAYOUT, 3, torch.device("cpu"))
    parts = ShardedKVCache(LAYOUT, 3, 2)
    try:
        whole.data.copy_(torch.randn(whole.data.shape))
        assert parts.pool is None
        for block in map(BlockId, range(3)):
            parts.write(block, whole.read(block))
        for rank, heads in enumerate((slice(0, 2), slice(2, 4))):
            assert torch.equal(parts._parts[rank], whole.data[:, :, :, heads])
        parts.copy(BlockId(2), BlockId(0))
        assert parts.read(BlockId(0)) == whole.read(BlockId(2))
        assert parts.read(BlockId(1)) == whole.read(BlockId(1))
        with pytest.raises(ValueError, match="a block has"):
            parts.write(BlockId(0), whole.read(BlockId(0))[:-1])
        with pytest.raises(IndexError):
            parts.read(BlockId(3))
    finally:
        parts.forget_files()


def test_a_rank_that_dies_is_an_error_and_no_wait(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    with built(tmp_path, 2) as (engine, _):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ranks = [pid for pid in children if b"tensor_parallel" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 1
        os.kill(int(ranks[0]), signal.SIGKILL)
        engine.submit(Request(request_id=RequestId("r"), prompt_token_ids=[5, 6, 7]))
        with pytest.raises(RuntimeError):
            for _ in range(3):
                engine.step()


def test_a_rank_that_ends_while_others_start_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for: as long as a large model takes to load."""
    save_checkpoint(tmp_path)

    def start(settings: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(workers, "_start", start)
    with pytest.raises(RuntimeError, match="rank 1 of this node did not start"), built(tmp_path, 2):
        pass


def test_ranks_wait_for_each_other_and_look_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    settings, looks = SimpleNamespace(rank=0, size=2), []

    def check() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            store.set("loaded 1", "")

    worker.wait_for_all("loaded", settings, store, check)  # type: ignore[arg-type]
    assert len(looks) == 3
    monkeypatch.setattr(worker, "START_TIMEOUT", timedelta(0))
    with pytest.raises(TimeoutError, match="not all ranks"):
        worker.wait_for_all("started", settings, store)  # type: ignore[arg-type]


def test_blocks_of_several_gpus_are_whole_outside() -> None:
    """The parts lie on a CPU here; where blocks wait for events of a GPU, nothing is left to wait for."""
    whole = KVCache(LAYOUT, 3, torch.device("cpu"))
    whole.data.copy_(torch.randn(whole.data.shape))
    parts = [torch.zeros(3, 2, 2, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    sharded = ShardedDeviceCache(LAYOUT, 3, parts)
    assert (sharded.pool, sharded.packing) == (None, None)
    for block in map(BlockId, range(3)):
        sharded.write(block, whole.read(block))
    for part, heads in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        assert torch.equal(part, whole.data[:, :, :, heads])
    sharded.copy(BlockId(2), BlockId(0))
    sharded.join()
    sharded.mark()
    sharded.wait()
    assert sharded.read(BlockId(0)) == whole.read(BlockId(2))
    assert sharded.read(BlockId(1)) == whole.read(BlockId(1))
    with pytest.raises(ValueError, match="a block has"):
        sharded.write(BlockId(0), whole.read(BlockId(0))[:-1])


def test_where_a_gpus_memory_lies_is_read_as_it_was_written() -> None:
    """The order is that of torch's own `rebuild_cuda_tensor`: a change there must be noticed."""
    shared = (1, b"\x00\n handle", 1 << 40, 512, False, b"counter", 3, b"event", True)
    arguments = (Tensor, (3, 2, 2, 1, 4, 8), (128, 64, 32, 32, 8, 1), 0, TypedStorage, torch.bfloat16, *shared)
    line = written(arguments)
    assert b"\n" not in line
    assert arguments_in(line) == arguments
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert (len(names), names[4:6], names[6:8]) == (15, ["storage_cls", "dtype"], ["storage_device", "storage_handle"])


def test_commands_are_read_as_they_were_written() -> None:
    request = Request(request_id=RequestId("r"), prompt_token_ids=[1, 2, 3], block_table=[BlockId(4), BlockId(1)])
    batch = host_batch([Chunk(request, 0, 3)], 2)
    stream = io.BytesIO()
    for command in (MakeCache(num_blocks=7, max_model_len=99, path="/x"), batch, CaptureDecodes()):
        write_command(stream, command)
    end = stream.tell()
    stream.seek(0)
    assert read_command(stream) == MakeCache(num_blocks=7, max_model_len=99, path="/x")
    found = read_command(stream)
    assert isinstance(found, HostBatch)
    for field in dataclasses.fields(HostBatch):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(batch, field.name), strict=True)
    assert read_command(stream) == CaptureDecodes()
    assert read_command(stream) is None
    cut = io.BytesIO(stream.getvalue()[: end // 2])
    read_command(cut)
    with pytest.raises(EOFError):
        read_command(cut)


def test_each_rank_wants_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cpu, gpu, second = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 1)
    assert [device_of_rank(second, rank) for rank in range(2)] == [torch.device("cuda", 1), torch.device("cuda", 2)]
    assert device_of_rank(gpu, 0) == torch.device("cuda", 0)
    assert device_of_rank(cpu, 1) == cpu
    check_devices(gpu, 3)
    check_devices(second, 2)
    check_devices(cpu, 8)
    for first, size in ((gpu, 4), (second, 3)):
        with pytest.raises(UnsupportedModel, match="this machine has 3"):
            check_devices(first, size)
    with pytest.raises(UnsupportedModel, match="not on meta"):
        check_devices(torch.device("meta"), 2)


def test_the_rank_with_the_least_memory_says_how_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_other = 700

    def all_reduce(own: torch.Tensor, how: object) -> None:
        assert how == ReduceOp.MIN
        own.clamp_(max=of_the_other)

    monkeypatch.setattr(memory, "all_reduce", all_reduce)
    assert memory.least_of_all(900, torch.device("cpu"), "") == 700
    assert memory.least_of_all(600, torch.device("cpu"), "") == 600
    of_the_other = 0
    with pytest.raises(NoRoomForKV, match="its log says why"):
        memory.least_of_all(600, torch.device("cpu"), "its log says why")


def test_sizes_that_do_not_divide_the_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    with pytest.raises(UnsupportedModel, match="3 does not divide the 4 attention heads"), built(tmp_path, 3):
        pass
