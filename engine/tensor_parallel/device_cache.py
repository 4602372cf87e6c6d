"""The KV cache of several ranks with a GPU each, as one.

    rank 0   cuda:0   [N, L, 2, K / size, B, D]      a block, as all others know it: [L, 2, K, B, D], heads in order
    rank 1   cuda:1   [N, L, 2, K / size, B, D]      another process's memory, opened by this one

Blocks go between the host and each GPU on streams of this process. What they wait for is rank 0's step: it cannot be
done with the step's last sum before the others have written their keys and values. And the others' next step begins
when rank 0's does: `Group.meet` stands behind what has come in.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.cuda_blocks import DeviceBlocks
from kvasir.engine.kv_cache import KVCache


class ShardedDeviceCache(KVCache):
    """`data` is the part of this rank, the first; blocks are read, written and copied whole."""

    def __init__(self, layout: KVLayout, num_blocks: int, parts: Sequence[Tensor]) -> None:
        super().__init__(layout, num_blocks, parts[0].device, parts[0])
        self._parts = [self._beside or DeviceBlocks(parts[0]), *map(DeviceBlocks, parts[1:])]
        heads = layout.num_kv_heads // len(parts)
        size = layout.bytes_per_block // (2 * layout.num_layers * layout.num_kv_heads)
        self._shape = (2 * layout.num_layers, heads, size)  # of a rank's part of a block, in bytes

    @property
    def pool(self) -> memoryview | None:
        """A block's bytes do not lie in one piece."""
        return None

    @property
    def packing(self) -> None:
        """A codec's payload has all heads in it."""
        return

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, put together."""
        heads = [np.frombuffer(part.read(block_id), np.uint8).reshape(self._shape) for part in self._parts]
        return np.concatenate(heads, axis=1).reshape(-1).data

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Give each rank its heads of exactly `layout.bytes_per_block` bytes."""
        if payload.nbytes != self.layout.bytes_per_block:
            raise ValueError(f"a block has {self.layout.bytes_per_block} bytes, the payload {payload.nbytes}")
        pairs, heads, size = self._shape
        whole = np.frombuffer(payload, np.uint8).reshape(pairs, heads * len(self._parts), size)
        for rank, part in enumerate(self._parts):
            own = np.ascontiguousarray(whole[:, rank * heads : (rank + 1) * heads])
            part.write(block_id, own.reshape(-1).data)

    def copy(self, source: BlockId, target: BlockId) -> None:
        for part in self._parts:
            part.copy(source, target)

    def join(self) -> None:
        if self.data.is_cuda:
            stream = torch.cuda.current_stream(self.data.device)
            for part in self._parts:
                for landing in part.landings():
                    stream.wait_event(landing)

    def mark(self) -> None:
        if self.data.is_cuda:
            computed = torch.cuda.current_stream(self.data.device).record_event()
            for part in self._parts:
                part.mark(computed)

    def wait(self) -> None:
        self._parts[0].wait()


def handle_of(part: Tensor) -> bytes:
    """What another process of this machine opens a GPU's memory by, while this process holds it; one line."""
    _, arguments = reduce_tensor(part)  # type: ignore[no-untyped-call]
    return written(arguments)


def opened(handle: bytes) -> Tensor:
    """The very same memory."""
    part: Tensor = rebuild_cuda_tensor(*arguments_in(handle))  # type: ignore[no-untyped-call]
    return part


def written(arguments: Sequence[Any]) -> bytes:
    """Those of torch's `rebuild_cuda_tensor`, as JSON."""
    _, size, stride, offset, _, dtype, *shared = arguments  # without the classes, which are always the same
    values = [size, stride, offset, str(dtype).removeprefix("torch."), *shared]
    return json.dumps(values, default=lambda data: {"base64": base64.b64encode(data).decode()}).encode()


def arguments_in(handle: bytes) -> tuple[Any, ...]:
    """What was `written`."""
    values = json.loads(handle, object_hook=lambda data: base64.b64decode(data["base64"]))
    size, stride, offset, dtype, *shared = values
    return Tensor, tuple(size), tuple(stride), offset, TypedStorage, getattr(torch, dtype), *shared
