"""A Redis-compatible server as the store: one value a block, with a time to live."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Literal

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockSource, Frame, StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.stored import before_payload, max_stored_bytes, split

_MAX_VALUE_BYTES = 512 * 1024 * 1024 - 1  # the server's own limit for a string
_MAX_CONNECTIONS = 32
_NUM_ASKED_AHEAD = 4  # values on their way while one is taken in


class RedisConnector:
    name = "redis"
    is_store: Literal[True] = True

    def __init__(self, settings: ConnectorSettings) -> None:
        self._prefix = settings.redis_prefix
        self._ttl_ms = int(settings.store_ttl_s * 1000)
        self._pool = BlockingConnectionPool.from_url(
            settings.redis_url,
            max_connections=_MAX_CONNECTIONS,
            timeout=settings.fetch_timeout_base_s,
            socket_timeout=settings.fetch_timeout_base_s,
            socket_connect_timeout=min(2.0, settings.fetch_timeout_base_s),
            retry=Retry(NoBackoff(), 0),  # the core decides what is tried again
            protocol=2,
        )

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        if max_stored_bytes(max_payload_bytes) > _MAX_VALUE_BYTES:
            raise ValueError(f"blocks of {max_payload_bytes} bytes are too large for one Redis value")

    async def close(self) -> None:
        await self._pool.disconnect()

    @property
    def endpoint(self) -> str:
        return ""

    async def put(self, frames: Sequence[tuple[StoreKey, Frame]]) -> None:
        async with self._connection() as connection:
            for key, frame in frames:
                await connection.send_packed_command([self._pack_set(key, frame)])
                await connection.read_response()

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        async with self._connection() as connection:
            await connection.send_packed_command(_pack_all(connection, "EXISTS", [self._name(key) for key in keys]))
            return [await connection.read_response() == 1 for _ in keys]

    async def fetch(self, keys: Sequence[StoreKey]) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        waiting, asked = iter(keys), deque[StoreKey]()
        async with self._connection() as connection:
            while True:
                more = list(islice(waiting, _NUM_ASKED_AHEAD - len(asked)))
                if more:
                    await connection.send_packed_command(_pack_all(connection, "GET", [self._name(k) for k in more]))
                    asked += more
                if not asked:
                    return
                value = await _read_value(connection)
                yield asked.popleft(), None if value is None else split(memoryview(value))

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        async with self._connection() as connection:
            await connection.send_command("UNLINK", *[self._name(key) for key in keys])
            await connection.read_response()

    def _name(self, key: StoreKey) -> str:
        return f"{self._prefix}:{key}"

    def _pack_set(self, key: StoreKey, frame: Frame) -> bytes:
        """SET, packed by hand: the client library's fast packer takes milliseconds for a megabyte.

        In one piece: what asyncio has not sent yet when we are cancelled must not point into the KV cache.
        """
        name, before, ttl_ms = self._name(key).encode(), before_payload(frame), str(self._ttl_ms).encode()
        num_bytes = len(before) + frame.payload.nbytes
        if num_bytes > _MAX_VALUE_BYTES:
            raise KVTransferError(f"a block of {num_bytes} bytes is too large for one Redis value")
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, num_bytes)
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl_ms), ttl_ms)
        return b"".join((head, before, frame.payload, tail))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AbstractConnection]:
        """One of the pool. However we leave, none with a reply still unread goes back alive."""
        try:
            connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            raise KVTransferError(f"no connection to Redis: {type(error).__name__}: {error}") from error
        is_clean = False
        try:
            yield connection
            is_clean = True
        except (RedisError, OSError) as error:
            raise KVTransferError(f"Redis: {type(error).__name__}: {error}") from error
        finally:
            await asyncio.shield(self._give_back(connection, is_clean))

    async def _give_back(self, connection: AbstractConnection, is_clean: bool) -> None:
        if not is_clean:
            await connection.disconnect(nowait=True)
        await self._pool.release(connection)


def _pack_all(connection: AbstractConnection, command: str, names: Sequence[str]) -> list[bytes]:
    return [piece for name in names for piece in connection.pack_command(command, name)]


async def _read_value(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):  # somebody else's
            return None
        raise
