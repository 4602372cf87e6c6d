"""A TCP proxy that misbehaves, in front of one node."""

import asyncio
from contextlib import suppress
from typing import Self

from kvasir.common.addresses import split_address

_CHUNK_BYTES = 1 << 16


class Proxy:
    """`async with Proxy(endpoint) as proxy`: receivers connect to `proxy.address` instead."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.num_bytes = 0  # that have come from the target
        self.flip_at: int | None = None  # this byte of them gets another bit; counted as `num_bytes` is
        self.cut_at: int | None = None  # there, all connections break
        self.delay_s = 0.0  # of each chunk
        self._target = split_address(target)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        connections = list(self._connections)
        self.cut()
        await asyncio.gather(*connections, return_exceptions=True)

    def cut(self) -> None:
        """All connections break, with what is on its way; new ones may be made."""
        for connection in self._connections:
            connection.cancel()

    def freeze(self) -> None:
        """Nothing gets through, and no connection ends."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with suppress(asyncio.CancelledError, OSError):
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._copy(reader, there_writer, is_answer=False))
                    group.create_task(self._copy(there_reader, writer, is_answer=True))
            except* OSError:
                pass
            finally:
                there_writer.transport.abort()
        writer.transport.abort()
        self._connections.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._flowing.wait()
            writer.write(await self._spoilt(data) if is_answer else data)
            await writer.drain()
        raise ConnectionError("one side has ended")  # and with it the other

    async def _spoilt(self, data: bytes) -> bytes:
        start, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        await asyncio.sleep(self.delay_s)
        if self.cut_at is not None and start <= self.cut_at < self.num_bytes:
            asyncio.get_running_loop().call_soon(self.cut)
            return data[: self.cut_at - start]
        if self.flip_at is not None and start <= self.flip_at < self.num_bytes:
            spoilt = bytearray(data)
            spoilt[self.flip_at - start] ^= 0x10
            return bytes(spoilt)
        return data
