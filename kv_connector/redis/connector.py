"""A Redis-compatible server as a store: one key per block, with a time to live.

The server may be full, evicting, a replica, slow, unreachable, or shared with other programs. Blocks from it are
checked like anything that comes over a network. If it refuses or does not answer, calls raise KVTransferError, and the
core does not ask it again for a while.
"""

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockSource, Frame, Land, StoreKey
from kvasir.kv_connector.redis.blocks import ALIGNMENT, exist, read, remove, write
from kvasir.kv_connector.redis.pool import RedisPool
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.store_reading import Sizes, StoreReader, Trays
from kvasir.kv_connector.stored import max_stored_bytes
from kvasir.kv_connector.threads import Job, Threads

log = logging.getLogger(__name__)

_MAX_BLOCK_BYTES = 1 << 30
_NUM_MOVING = 8  # threads that move blocks, each with a connection
_NUM_ASKING = 4  # threads for short questions, so that these do not wait for blocks


class RedisConnector:
    name = "redis"
    is_store: Literal[True] = True

    def __init__(self, settings: ConnectorSettings) -> None:
        self._prefix = settings.redis_prefix.encode()
        self._ttl_ms = max(1, int(settings.store_ttl_s * 1000))
        self.pool = RedisPool(settings.redis_url, settings.fetch_timeout_base_s)
        self._moving = Threads(_NUM_MOVING, "kv-redis")
        self._asking = Threads(_NUM_ASKING, "kv-redis-ask")
        self._reader: StoreReader | None = None

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        max_bytes = max_stored_bytes(max_payload_bytes, ALIGNMENT)
        if max_bytes > _MAX_BLOCK_BYTES:
            raise ValueError(f"blocks of {max_payload_bytes} bytes are too large for Redis")
        self._reader = StoreReader(self._moving, Trays(max_bytes), ALIGNMENT, self._read)
        try:
            await self.contains([])
        except KVTransferError as error:
            log.warning("Redis is not ready yet: %s", error)

    async def close(self) -> None:
        self._moving.stop()
        self._asking.stop()
        self.pool.close()

    @property
    def endpoint(self) -> str:
        return ""

    async def put(self, frames: Iterable[tuple[StoreKey, Frame]]) -> None:
        def write_all(job: Job[None]) -> None:
            with self.pool.link(job) as link:
                write(link, ((self._name(key), frame) for key, frame in frames), self._ttl_ms)

        job = self._moving.start(write_all)
        try:
            await job.outcome()
        finally:
            await job.settled()  # nothing reads the payloads any more

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        def ask(job: Job[list[bool]]) -> list[bool]:
            with self.pool.link(job) as link:
                return exist(link, [self._name(key) for key in keys])

        return await self._asking.start(ask).outcome()

    def fetch(
        self, keys: Sequence[StoreKey], *, land: Land | None = None
    ) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        assert self._reader is not None, "opened"
        return self._reader.fetch(keys, land)

    def _read(self, job: Job[Any], keys: Sequence[StoreKey], places: Sequence[memoryview]) -> Sizes:
        with self.pool.link(job) as link:
            yield from read(link, [self._name(key) for key in keys], places, self._ttl_ms)

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        def forget(job: Job[None]) -> None:
            with self.pool.link(job) as link:
                remove(link, [self._name(key) for key in keys])

        await self._asking.start(forget).outcome()

    def _name(self, key: StoreKey) -> bytes:
        return b"%b:%b" % (self._prefix, key.encode())
