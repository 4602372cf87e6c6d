"""A rank other than the first: computes its share of each step that rank 0 tells it of, until its input ends."""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

from kvasir.engine.blocks import KVLayout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.tensor_parallel.cache import map_part
from kvasir.engine.tensor_parallel.group import Group, within
from kvasir.engine.tensor_parallel.messages import read_batch
from kvasir.kernels.linear import Quantization

READY = b"ready\n"
STEP_TIMEOUT = timedelta(seconds=60)  # a rank that the others wait for longer is taken for lost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One line of JSON, the first of its input."""

    rank: int
    size: int
    port: int  # where the ranks meet, on this machine
    num_threads: int
    model: str
    dtype: str
    quantization: Quantization
    max_model_len: int
    kv_path: str
    num_blocks: int
    layout: KVLayout

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> "WorkerSettings":
        values = json.loads(text)
        return WorkerSettings(**(values | {"layout": KVLayout(**values["layout"])}))


def main() -> None:
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    settings = WorkerSettings.from_json(commands.readline())
    torch.set_num_threads(settings.num_threads)
    join(settings.rank, settings.size, TCPStore("127.0.0.1", settings.port, settings.size))
    directory = Path(settings.model)
    config = replace(
        read_model_config(directory).for_length(settings.max_model_len), quantization=settings.quantization
    )
    with within(Group(settings.rank, settings.size)):
        model = load_model(directory, config, getattr(torch, settings.dtype), torch.device("cpu"))
    part = map_part(Path(settings.kv_path), settings.layout, settings.num_blocks, settings.size)
    answers.write(READY)
    answers.flush()
    with torch.inference_mode():
        while (batch := read_batch(commands)) is not None:
            model.forward(batch, part)


def join(rank: int, size: int, store: TCPStore) -> None:
    """Waits until all ranks have come."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)


if __name__ == "__main__":
    main()
