"""A rank other than the first: computes its share of each step that rank 0 tells it of, until its input ends."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

from kvasir.engine.batch import HostBatch
from kvasir.engine.blocks import KVLayout
from kvasir.engine.cuda_graphs import CudaCapture
from kvasir.engine.forward_pass import ForwardPass
from kvasir.engine.kv_cache import cache_shape
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.tensor_parallel.cache import map_part
from kvasir.engine.tensor_parallel.device_cache import handle_of
from kvasir.engine.tensor_parallel.group import Group, within
from kvasir.engine.tensor_parallel.memory import shared_budget_bytes
from kvasir.engine.tensor_parallel.messages import MakeCache, read_command
from kvasir.kernels import backend
from kvasir.kernels.linear import Quantization

READY = b"ready"
START_TIMEOUT = timedelta(seconds=300)  # a large model loads slowly
STEP_TIMEOUT = timedelta(seconds=60)  # a rank that the others wait for longer is taken for lost
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One line of JSON, the first of its input."""

    rank: int
    size: int
    port: int  # where the ranks meet, on this machine
    num_threads: int
    device: str  # this rank's
    attention_backend: backend.Backend
    model: str
    dtype: str
    quantization: Quantization
    max_model_len: int
    layout: KVLayout  # of whole blocks
    max_num_batched_tokens: int
    max_num_seqs: int
    num_drafts: int
    gpu_memory_utilization: float
    profiles: bool  # all ranks find out together how much memory there is for KV

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> "WorkerSettings":
        values = json.loads(text)
        return WorkerSettings(**(values | {"layout": KVLayout(**values["layout"])}))

    @property
    def part(self) -> KVLayout:
        """Of this rank's heads alone"""
        return replace(self.layout, num_kv_heads=self.layout.num_kv_heads // self.size)


@torch.inference_mode()
def main() -> None:
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    settings = WorkerSettings.from_json(commands.readline())
    device = torch.device(settings.device)
    backend.use(settings.attention_backend)
    torch.set_num_threads(settings.num_threads)
    store = TCPStore("127.0.0.1", settings.port, settings.size)
    group = join(settings, store)
    config = replace(
        read_model_config(Path(settings.model)).for_length(settings.max_model_len), quantization=settings.quantization
    )
    with within(group):
        model = load_model(Path(settings.model), config, getattr(torch, settings.dtype), device)
    if settings.profiles:
        wait_for_all("loaded", settings, store)
        shared_budget_bytes(model, settings, device)
    command = read_command(commands)
    if not isinstance(command, MakeCache):
        return  # rank 0 has given up
    part, handle = _make_part(command, settings, device)
    forward = ForwardPass(model, part, settings.layout.block_size, command.max_model_len)
    answers.write(READY + b" " + handle + b"\n")
    answers.flush()
    while (command := read_command(commands)) is not None:
        if isinstance(command, HostBatch):
            group.meet(device)
            forward(command)
        else:
            forward.capture_decodes(settings.max_num_seqs, settings.num_drafts, CudaCapture())
    torch.distributed.destroy_process_group()


def join(settings: WorkerSettings, store: TCPStore, check: Callable[[], None] = lambda: None) -> Group:
    """Waits until all ranks have come. `check` as in `wait_for_all`."""
    wait_for_all("started", settings, store, check)
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        init_process_group(
            "nccl", store=store, rank=settings.rank, world_size=settings.size, timeout=STEP_TIMEOUT, device_id=device
        )
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        init_process_group("gloo", store=store, rank=settings.rank, world_size=settings.size, timeout=STEP_TIMEOUT)
    return Group(settings.rank, settings.size)


def wait_for_all(
    stage: str, settings: WorkerSettings, store: TCPStore, check: Callable[[], None] = lambda: None
) -> None:
    """Until all ranks have come to this stage: one starts or loads faster than another, and a step's patience is too
    short for that.

    check: is called again and again meanwhile, and may raise. Raises TimeoutError after START_TIMEOUT.
    """
    store.set(f"{stage} {settings.rank}", "")
    deadline = time.monotonic() + START_TIMEOUT.total_seconds()
    while not store.check([f"{stage} {rank}" for rank in range(settings.size)]):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks of this node have {stage} in {START_TIMEOUT.total_seconds():.0f} s")
        time.sleep(_POLL_S)


def _make_part(command: MakeCache, settings: WorkerSettings, device: torch.device) -> tuple[Tensor, bytes]:
    """-> this rank's part of the cache, and how rank 0 finds it where it has not made it itself"""
    if command.path:
        return map_part(Path(command.path), settings.layout, command.num_blocks, settings.size), b""
    shape = cache_shape(settings.part, command.num_blocks)
    part = torch.zeros(shape, dtype=getattr(torch, settings.part.dtype), device=device)
    return part, handle_of(part)


if __name__ == "__main__":
    main()
