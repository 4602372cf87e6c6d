"""Rank 0: starts the other ranks, and has them compute their share of each step."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import IO

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvasir.engine.batch import HostBatch
from kvasir.engine.blocks import KVLayout
from kvasir.engine.forward_pass import Model
from kvasir.engine.kv_cache import KVCache, cache_shape
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.settings import EngineSettings
from kvasir.engine.tensor_parallel.cache import ShardedKVCache
from kvasir.engine.tensor_parallel.device_cache import ShardedDeviceCache, opened
from kvasir.engine.tensor_parallel.group import check_devices, check_shares, device_of_rank
from kvasir.engine.tensor_parallel.memory import shared_budget_bytes
from kvasir.engine.tensor_parallel.messages import CaptureDecodes, Command, MakeCache, write_command
from kvasir.engine.tensor_parallel.worker import READY, START_TIMEOUT, WorkerSettings, join, wait_for_all

_STOP_TIMEOUT_S = 5.0


class Workers:
    """The processes of ranks 1, 2, ... They end when this process does, however it does. `Followers` of rank 0."""

    def __init__(self, settings: WorkerSettings) -> None:
        """`settings` of rank 0; waits until the others have joined. Raises RuntimeError if one ends before."""
        self._settings = settings
        self._device = torch.device(settings.device)
        self._store = TCPStore("127.0.0.1", 0, settings.size, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, settings.size):
                device = str(device_of_rank(self._device, rank))
                self._processes.append(_start(replace(settings, rank=rank, port=self._store.port, device=device)))
            self.group = join(settings, self._store, self._check)
        except BaseException:
            self.close()
            raise

    def budget_bytes(self, model: Model) -> int:
        """What all GPUs together have for KV; raises NoRoomForKV. `profiles` must have been set."""
        wait_for_all("loaded", self._settings, self._store, self._check)
        return shared_budget_bytes(model, self._settings, self._device)

    def make_cache(self, num_blocks: int, max_model_len: int) -> KVCache:
        """Waits until all have loaded their part of the model. Raises RuntimeError if one cannot."""
        layout, size = self._settings.layout, self._settings.size
        if self._device.type == "cpu":
            sharded = ShardedKVCache(layout, num_blocks, size)
            try:
                self._order_caches(num_blocks, max_model_len, lambda rank: str(sharded.path_of(rank)))
            finally:
                sharded.forget_files()
            return sharded
        shape = cache_shape(self._settings.part, num_blocks)
        own = torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=self._device)
        handles = self._order_caches(num_blocks, max_model_len, lambda rank: "")
        return ShardedDeviceCache(layout, num_blocks, [own, *map(opened, handles)])

    def forward(self, batch: HostBatch) -> None:
        """Returns at once; they compute while this rank does."""
        self._tell(batch)
        self.group.meet(self._device)

    def capture_decodes(self) -> None:
        self._tell(CaptureDecodes())

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

    def _order_caches(self, num_blocks: int, max_model_len: int, path_of: Callable[[int], str]) -> list[bytes]:
        """-> what each rank answers"""
        overdue = threading.Timer(START_TIMEOUT.total_seconds(), self._kill)
        overdue.start()
        try:
            for rank in range(1, len(self._processes) + 1):
                order = MakeCache(num_blocks=num_blocks, max_model_len=max_model_len, path=path_of(rank))
                self._tell_one(rank, order)
            return [self._answer_of(rank) for rank in range(1, len(self._processes) + 1)]
        finally:
            overdue.cancel()

    def _answer_of(self, rank: int) -> bytes:
        stdout = self._processes[rank - 1].stdout
        assert stdout is not None
        word, _, rest = stdout.readline().rstrip(b"\n").partition(b" ")
        if word != READY:
            raise RuntimeError(f"rank {rank} of this node did not start; its log is in this process's")
        return rest

    def _tell(self, command: Command) -> None:
        for rank in range(1, len(self._processes) + 1):
            self._tell_one(rank, command)

    def _tell_one(self, rank: int, command: Command) -> None:
        stdin: IO[bytes] | None = self._processes[rank - 1].stdin
        assert stdin is not None
        try:
            write_command(stdin, command)
        except OSError as error:
            raise RuntimeError(f"rank {rank} of this node has ended") from error

    def _check(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise RuntimeError(f"rank {rank} of this node did not start; its log is in this process's")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def start_workers(
    settings: EngineSettings, config: ModelConfig, dtype: torch.dtype, layout: KVLayout, max_model_len: int
) -> Workers:
    """As many ranks as `tensor_parallel_size`; on a CPU they share its compute threads.

    Raises UnsupportedModel where the model cannot be cut so, or there are fewer GPUs; RuntimeError if a rank does not
    start.
    """
    size, first = settings.tensor_parallel_size, torch.device(settings.device)
    check_shares(config, size)
    check_devices(first, size)
    if first.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    return Workers(
        WorkerSettings(
            rank=0,
            size=size,
            port=0,
            num_threads=torch.get_num_threads(),
            device=str(device_of_rank(first, 0)),
            attention_backend=settings.attention_backend,
            model=settings.model,
            dtype=str(dtype).removeprefix("torch."),
            quantization=config.quantization,
            max_model_len=max_model_len,
            layout=layout,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            num_drafts=settings.num_drafts,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            profiles=first.type != "cpu" and not settings.kv_cache_memory,
        )
    )


def _start(settings: WorkerSettings) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir.engine.tensor_parallel.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(settings.to_json().encode() + b"\n")
    process.stdin.flush()
    return process
