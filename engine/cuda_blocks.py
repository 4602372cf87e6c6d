"""Blocks of a KV cache on a GPU, read and written by any thread while the engine computes.

    engine's stream   | step n |c| step n + 1      |w| step n + 2 | ...
    outgoing                    | read block 7 |                        after c, and after what came in
    incoming                         | write block 3 |l|                after c; the engine waits for l at w

An event c stands behind each step. What is read was computed by a step before it; what is written over was last used
by one. Nobody waits for the whole device, and the engine's thread waits for nobody.
"""

import threading

import numpy as np
import torch
from torch import Tensor

from kvasir.engine.block_transfer import BlockTransfer
from kvasir.engine.blocks import BlockId

_NUM_BUFFERS = 4  # blocks under way in each direction


class DeviceBlocks:
    """`read` and `write` are for any thread, `mark` and `join` for the engine's."""

    def __init__(self, kv_cache: Tensor, num_buffers: int = _NUM_BUFFERS) -> None:
        """kv_cache [N, L, 2, K, B, D]"""
        self._device = kv_cache.device
        self._outgoing = BlockTransfer(kv_cache, 1, num_buffers=num_buffers)
        self._incoming = BlockTransfer(kv_cache, 1, num_buffers=num_buffers)
        self._readers, self._writers = (threading.BoundedSemaphore(num_buffers) for _ in range(2))
        self._computed: torch.cuda.Event | None = None

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, in memory of their own; waits until they are there."""
        with self._readers:
            gathered = self._outgoing.gather([block_id], self._events(self._computed, self._incoming.landing))
            assert gathered is not None, "a reader holds one buffer at most, and gives it back idle"
            try:
                (payload,) = gathered.payloads()
                return np.frombuffer(payload, np.uint8).copy().data
            finally:
                self._outgoing.release(gathered)

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """The payload has been read when this returns; it lands before anything that is launched behind a `join`."""
        with self._writers:
            while not self._incoming.scatter([block_id], [payload], self._events(self._computed)):
                self._incoming.wait()

    def mark(self) -> None:
        """Readers and writers wait for what has been launched so far, and for nothing later."""
        if self._device.type == "cuda":
            self._computed = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Until the device has come to the last `mark`."""
        if self._computed is not None:
            self._computed.synchronize()

    def join(self) -> None:
        """What is launched from now on sees all blocks that were written. The host does not wait."""
        self._incoming.join()

    @staticmethod
    def _events(*events: "torch.cuda.Event | None") -> "list[torch.cuda.Event]":
        return [event for event in events if event is not None]
