"""Blocks between the KV cache and the host, beside the computation: a stream of its own, pinned buffers, events.

    compute stream   | step n      |e| step n + 1       | ...          e: an event; nobody waits for the whole device
                                    v
    this stream                     | pack | to the host |e'|           e': the payloads are there

On a CPU, all of it is done when the call returns. Any thread may call, with events of its own to be waited for.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir.engine.blocks import BlockId
from kvasir.kernels.block_bytes import pool_bytes
from kvasir.kernels.pack_blocks import Codec, pack_blocks, payload_bytes, unpack_blocks

Events = Sequence["torch.cuda.Event"]

_ALIGNMENT_BYTES = 32  # where a row of staging begins: the kernels' widest stores


@dataclass(eq=False, slots=True)
class _Buffer:
    host: Tensor  # [P, bytes of a row] uint8; pinned where there is a GPU
    staging: Tensor  # the same on the device; on a CPU the very same
    done: "torch.cuda.Event | None" = None  # after the last that used it

    def is_idle(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def row(self, index: int, num_bytes: int) -> memoryview:
        """The first bytes of a row, in host memory"""
        size = self.host.shape[1]
        return pool_bytes(self.host).cast("B")[index * size : index * size + num_bytes]


@dataclass(eq=False, slots=True)
class Gathered:
    """Packed blocks on their way to the host, or there. The blocks may be overwritten once `is_ready`."""

    _buffer: _Buffer
    _num_blocks: int
    _payload_bytes: int
    _is_released: bool = field(default=False)

    def is_ready(self) -> bool:
        return self._buffer.is_idle()

    def payloads(self) -> list[memoryview]:
        """Of each block, in the order asked for; waits until they are there. Good until `release`."""
        if self._is_released:
            raise RuntimeError("the payloads have been released")
        if self._buffer.done is not None:
            self._buffer.done.synchronize()
        return [self._buffer.row(index, self._payload_bytes) for index in range(self._num_blocks)]


class BlockTransfer:
    def __init__(
        self, kv_cache: Tensor, max_blocks: int, *, codec: Codec = "none", heads: range | None = None,
        num_buffers: int = 2,
    ) -> None:  # fmt: skip
        """max_blocks: in one call. Takes memory for num_buffers times as many, on the host and on the device."""
        self._kv_cache, self._codec, self._heads, self._max_blocks = kv_cache, codec, heads, max_blocks
        self.payload_bytes = payload_bytes(kv_cache, codec, heads)
        is_cuda = kv_cache.is_cuda
        shape = (max_blocks, -(-self.payload_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        self._stream = torch.cuda.Stream(kv_cache.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._free: list[_Buffer] = []
        for _ in range(num_buffers):
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda)
            self._free.append(_Buffer(host, torch.empty_like(host, device=kv_cache.device) if is_cuda else host))
        self._lock = threading.Lock()  # of the buffers, and of an event together with what it is recorded behind
        self._landing: torch.cuda.Event | None = None

    def gather(self, blocks: Sequence[BlockId], after: "Events | None" = None) -> Gathered | None:
        """Pack these blocks as they are after these events; None: after what this thread has launched so far.

        None is returned where all buffers are in use.
        """
        buffer = self._take(blocks)
        if buffer is None:
            return None
        rows = slice(len(blocks))
        if self._stream is None:
            self._pack(blocks, buffer.staging[rows])
        else:
            with self._beside(self._stream, after):
                self._pack(blocks, buffer.staging[rows])
                buffer.host[rows].copy_(buffer.staging[rows], non_blocking=True)
                buffer.done = self._stream.record_event()
        return Gathered(buffer, len(blocks), self.payload_bytes)

    def release(self, gathered: Gathered) -> None:
        """Its buffer may be used again. Once for each; twice is an error."""
        if gathered._is_released:
            raise RuntimeError("released twice")
        gathered._is_released = True
        with self._lock:
            self._free.append(gathered._buffer)

    def scatter(self, blocks: Sequence[BlockId], payloads: Sequence[memoryview], after: "Events | None" = None) -> bool:
        """Unpack into these blocks, all different, after these events; None: after what this thread has launched.

        The payloads have been read when it returns. False: all buffers are in use, and nothing has been done. Whoever
        reads the blocks waits for `landing` before.
        """
        if any(payload.nbytes != self.payload_bytes for payload in payloads) or len(payloads) != len(blocks):
            raise ValueError(f"{len(blocks)} payloads of {self.payload_bytes} bytes expected")
        buffer = self._take(blocks)
        if buffer is None:
            return False
        rows = slice(len(blocks))
        for index, payload in enumerate(payloads):
            buffer.row(index, self.payload_bytes)[:] = payload.cast("B")
        if self._stream is None:
            self._unpack(buffer.staging[rows], blocks)
        else:
            with self._beside(self._stream, after):
                buffer.staging[rows].copy_(buffer.host[rows], non_blocking=True)
                self._unpack(buffer.staging[rows], blocks)
                buffer.done = self._landing = self._stream.record_event()
        with self._lock:
            self._free.append(buffer)
        return True

    def copy(self, source: BlockId, target: BlockId, after: "Events | None" = None) -> None:
        """One block over another, as `scatter` would."""
        if self._stream is None:
            self._kv_cache[target].copy_(self._kv_cache[source])
        else:
            with self._beside(self._stream, after):
                self._kv_cache[target].copy_(self._kv_cache[source])
                self._landing = self._stream.record_event()

    @property
    def landing(self) -> "torch.cuda.Event | None":
        """Behind all that was scattered so far; None: on a CPU, or nothing was."""
        return self._landing

    def join(self) -> None:
        """What this thread launches from now on sees all that was scattered. The host does not wait."""
        landing = self._landing
        if landing is not None:
            torch.cuda.current_stream(self._kv_cache.device).wait_event(landing)

    def wait(self) -> None:
        """Until one of the buffers that nobody holds is idle, if there is one."""
        with self._lock:
            event = next((buffer.done for buffer in self._free), None)  # the first was given back first
        if event is not None:
            event.synchronize()

    @contextmanager
    def _beside(self, stream: "torch.cuda.Stream", after: "Events | None") -> Iterator[None]:
        """What is launched within goes to this stream, behind these events; nothing comes between."""
        launched = torch.cuda.current_stream(self._kv_cache.device)
        with self._lock, torch.cuda.stream(stream):
            if after is None:
                stream.wait_stream(launched)
            for event in after or ():
                stream.wait_event(event)
            yield

    def _take(self, blocks: Sequence[BlockId]) -> _Buffer | None:
        if not 0 < len(blocks) <= self._max_blocks:
            raise ValueError(f"{len(blocks)} blocks; from 1 to {self._max_blocks} go at once")
        num_blocks = len(self._kv_cache)
        if not all(0 <= block < num_blocks for block in blocks):
            raise IndexError(f"blocks {min(blocks)} to {max(blocks)} of {num_blocks}")
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.is_idle():
                    return self._free.pop(index)
        return None

    def _pack(self, blocks: Sequence[BlockId], staging: Tensor) -> None:
        rows = staging[:, : self.payload_bytes]
        pack_blocks(self._kv_cache, self._ids(blocks), rows, codec=self._codec, heads=self._heads)

    def _unpack(self, staging: Tensor, blocks: Sequence[BlockId]) -> None:
        rows = staging[:, : self.payload_bytes]
        unpack_blocks(rows, self._ids(blocks), self._kv_cache, codec=self._codec, heads=self._heads)

    def _ids(self, blocks: Sequence[BlockId]) -> Tensor:
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._stream is not None)
        return ids.to(self._kv_cache.device, non_blocking=True)
