"""Where an engine puts what it reads: a buffer apart from the KV cache, so that a late write can damage no block."""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from kvasir.kv_connector.one_sided.engine import Pool, ReadChannel, ReadEngine
from kvasir.kv_connector.threads import Job, Threads

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # an engine may take a while to meet a peer for the first time

_never_freed: list["Staging"] = []


class Staging:
    """Slots of one block each, for one link. Written to once here, so that no first block waits for page faults."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._bytes = np.full((num_slots, block_bytes), 0xFF, np.uint8)
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self.has_free = asyncio.Event()
        self.has_free.set()

    @property
    def pool(self) -> Pool:
        return Pool.of(self._bytes.data)

    def slot(self, slot: int) -> memoryview:
        return memoryview(self._bytes[slot])

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, most: int) -> list[int]:
        """At most so many free slots, neighbours if possible."""
        taken, self._free = self._free[:most], self._free[most:]
        if not self._free:
            self.has_free.clear()
        return taken

    def put_back(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots])
        self.has_free.set()

    def keep_for_ever(self) -> None:
        """An engine may still write here, and nobody can say until when."""
        _never_freed.append(self)


class StagedReads:
    """Reads from one peer into one staging buffer, on a thread of their own."""

    def __init__(self, engine: ReadEngine, peer: str, staging: Staging) -> None:
        self.staging = staging
        self._engine = engine
        self._peer = peer
        self._worker = Threads(1, f"kv-{peer}")
        self._channel: ReadChannel | None = None  # the worker's

    async def connect(self, description: bytes, remote: Pool) -> None:
        """Connect the engine to the peer's pool. Raises whatever the engine raises."""
        await asyncio.shield(self._worker.start(self._connect, description, remote).done)

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> asyncio.Future[None]:
        """Copy blocks of the peer's pool, by index, into our slots."""
        return self._worker.start(self._read, remote, local, timeout_s).done

    def close(self) -> asyncio.Future[None]:
        """The future is done when nothing can be written to the staging buffer any more; that may be never."""
        closing = self._worker.start(self._close).done
        self._worker.stop()
        closing.add_done_callback(self._closed)
        return closing

    # On the worker's thread.

    def _connect(self, job: Job[None], description: bytes, remote: Pool) -> None:
        self._channel = self._engine.connect(description, remote, self.staging.pool)
        self._channel.read([0], [0], CONNECT_TIMEOUT_S)  # engines connect when something is read, and not before

    def _read(self, job: Job[None], remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        assert self._channel is not None, "connected"
        self._channel.read(remote, local, timeout_s)

    def _close(self, job: Job[None]) -> None:
        if self._channel is not None:
            self._channel.close()

    def _closed(self, closing: asyncio.Future[None]) -> None:
        if closing.cancelled() or closing.exception():
            log.warning("reads from %s cannot be ended: %r", self._peer, closing)
            self.staging.keep_for_ever()
