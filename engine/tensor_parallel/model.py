"""Rank 0: starts the other ranks, and has them compute their share of each step."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvasir.engine.batch import BatchInputs
from kvasir.engine.blocks import KVLayout
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.model_runner import Model
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.models.loader import load_model
from kvasir.engine.tensor_parallel.cache import ShardedKVCache
from kvasir.engine.tensor_parallel.group import Group, within
from kvasir.engine.tensor_parallel.messages import write_batch
from kvasir.engine.tensor_parallel.worker import READY, WorkerSettings, join

_START_TIMEOUT_S = 300.0  # a large model loads slowly
_STOP_TIMEOUT_S = 5.0


class Workers:
    """The processes of ranks 1, 2, ... They end when this process does, however it does."""

    def __init__(self, settings: WorkerSettings, kv_cache: ShardedKVCache) -> None:
        """`settings` of rank 0; waits until the others have joined."""
        store = TCPStore("127.0.0.1", 0, settings.size, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, settings.size):
                own = replace(settings, rank=rank, port=store.port, kv_path=str(kv_cache.path_of(rank)))
                self._processes.append(_start(own))
            join(0, settings.size, store)
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Until all have loaded their part of the model. Raises RuntimeError if one cannot."""
        overdue = threading.Timer(_START_TIMEOUT_S, self._kill)
        overdue.start()
        try:
            for rank, process in enumerate(self._processes, 1):
                assert process.stdout is not None
                if process.stdout.readline() != READY:
                    raise RuntimeError(f"rank {rank} of this node did not start; its log is in this process's")
        finally:
            overdue.cancel()

    def forward(self, batch: BatchInputs) -> None:
        """Returns at once; they compute while this rank does."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                write_batch(process.stdin, batch)
            except OSError as error:
                raise RuntimeError(f"rank {rank} of this node has ended") from error

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()  # also tells it to end
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


class TensorParallelModel:
    """As the model of one rank."""

    def __init__(self, model: LlamaForCausalLM, workers: Workers) -> None:
        self.config: ModelConfig = model.config
        self._model = model
        self._workers = workers

    def forward(self, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        self._workers.forward(batch)
        return self._model.forward(batch, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of whole rows, here alone: the head is whole on each rank."""
        return self._model.logits(hidden)


def _start(settings: WorkerSettings) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir.engine.tensor_parallel.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(settings.to_json().encode() + b"\n")
    process.stdin.flush()
    return process


def load_sharded(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    layout: KVLayout,
    num_blocks: int,
    size: int,
    max_model_len: int,
) -> tuple[Model, KVCache, Callable[[], None]]:
    """The model and its KV cache on `size` ranks of this machine, which share its compute threads; what ends them.

    Raises RuntimeError if a rank does not start.
    """
    num_threads = max(torch.get_num_threads() // size, 1)
    torch.set_num_threads(num_threads)
    kv_cache = ShardedKVCache(layout, num_blocks, size)
    settings = WorkerSettings(
        rank=0, size=size, port=0, num_threads=num_threads, model=str(directory),
        dtype=str(dtype).removeprefix("torch."), quantization=config.quantization, max_model_len=max_model_len,
        kv_path="", num_blocks=num_blocks, layout=layout,
    )  # fmt: skip
    try:
        workers = Workers(settings, kv_cache)
        try:
            with within(Group(0, size)):
                model = load_model(directory, config, dtype, torch.device("cpu"))
            workers.wait_ready()
        except BaseException:
            workers.close()
            raise
    finally:
        kv_cache.forget_files()
    return TensorParallelModel(model, workers), kv_cache, workers.close
