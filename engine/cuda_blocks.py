"""Blocks of a KV cache on a GPU, read and written by any thread while the engine computes.

    engine's stream   | step n |c| step n + 1      |w| step n + 2 | ...
    outgoing                    | read block 7 |                        after c, and after what came in
    incoming                         | write block 3 |l|                after c; the engine waits for l at w

An event c stands behind each step. What is read was computed by a step before it; what is written over was last used
by one. Nobody waits for the whole device, and the engine's thread waits for nobody.

Blocks that a lossy codec packs are packed and unpacked on the GPU: half the bytes, or fewer, cross the bus.
"""

import threading

import numpy as np
import torch
from torch import Tensor

from kvasir.engine.block_transfer import BlockTransfer
from kvasir.engine.blocks import BlockId
from kvasir.kernels.pack_blocks import checked_codec

_NUM_BUFFERS = 4  # blocks under way in each direction


class DeviceBlocks:
    """`mark`, `wait` and `join` are for the engine's thread, all else is for any."""

    def __init__(self, kv_cache: Tensor, num_buffers: int = _NUM_BUFFERS) -> None:
        """kv_cache [N, L, 2, K, B, D]"""
        self._kv_cache, self._num_buffers = kv_cache, num_buffers
        self._outgoing: dict[str, BlockTransfer] = {}  # by codec
        self._incoming: dict[str, BlockTransfer] = {}
        self._lock = threading.Lock()  # of both
        for transfers in (self._outgoing, self._incoming):
            self._transfer(transfers, "none")
        self._readers, self._writers = (threading.BoundedSemaphore(num_buffers) for _ in range(2))
        self._computed: torch.cuda.Event | None = None

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, in memory of their own; waits until they are there."""
        out = np.empty(self._transfer(self._outgoing, "none").payload_bytes, np.uint8)
        self.read_packed(block_id, "none", out.data)
        return out.data

    def read_packed(self, block_id: BlockId, codec: str, out: memoryview) -> None:
        """What `pack_blocks` makes of the block, into `out`; waits until it is there."""
        transfer = self._transfer(self._outgoing, codec)
        with self._readers:
            gathered = transfer.gather([block_id], self._before())
            assert gathered is not None, "a reader holds one buffer at most, and gives it back idle"
            try:
                (payload,) = gathered.payloads()
                out[:] = payload
            finally:
                transfer.release(gathered)

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """The payload has been read when this returns; it lands before anything that is launched behind a `join`."""
        self.write_packed(block_id, "none", payload)

    def write_packed(self, block_id: BlockId, codec: str, packed: memoryview) -> None:
        """The same with what `pack_blocks` made of a block."""
        transfer = self._transfer(self._incoming, codec)
        with self._writers:
            while not transfer.scatter([block_id], [packed], self._before()):
                transfer.wait()

    def copy(self, source: BlockId, target: BlockId) -> None:
        """One block over another; it lands as what is written does."""
        self._transfer(self._incoming, "none").copy(source, target, self._before())

    def mark(self, computed: "torch.cuda.Event | None" = None) -> None:
        """Readers and writers wait for this event, by default what has been launched so far, and for nothing later."""
        if computed is None and self._kv_cache.is_cuda:
            computed = torch.cuda.current_stream(self._kv_cache.device).record_event()
        self._computed = computed

    def wait(self) -> None:
        """Until the device has come to the last `mark`."""
        if self._computed is not None:
            self._computed.synchronize()

    def join(self) -> None:
        """What is launched from now on sees all blocks that were written. The host does not wait."""
        for transfer in self._all_incoming():
            transfer.join()

    def _transfer(self, transfers: dict[str, BlockTransfer], codec: str) -> BlockTransfer:
        """Takes memory for its buffers when a codec is first used. ValueError: there is no such codec."""
        with self._lock:
            if codec not in transfers:
                name = checked_codec(codec)
                transfers[codec] = BlockTransfer(self._kv_cache, 1, codec=name, num_buffers=self._num_buffers)
            return transfers[codec]

    def _all_incoming(self) -> list[BlockTransfer]:
        with self._lock:
            return list(self._incoming.values())

    def landings(self) -> "list[torch.cuda.Event]":
        """Behind all that was written so far"""
        events = [transfer.landing for transfer in self._all_incoming()]
        return [event for event in events if event is not None]

    def _before(self) -> "list[torch.cuda.Event]":
        """What a read or a write waits for: the last `mark`, and what has come in, by whatever codec."""
        return [*([] if self._computed is None else [self._computed]), *self.landings()]
