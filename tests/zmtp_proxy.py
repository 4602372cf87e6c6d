"""A proxy that understands ZeroMQ's messages (ZMTP 3, not encrypted) and lets a test change those of the sender."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from kvasir.common.addresses import split_address

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4

Message = tuple[bytes, ...]  # its frames
Tamper = Callable[[Message], Iterable[Message]]  # what goes on in place of a message


class ZmtpProxy:
    """`async with ZmtpProxy(endpoint, tamper) as proxy`: receivers connect to `proxy.address`."""

    def __init__(self, target: str, tamper: Tamper = lambda message: [message]) -> None:
        self.address = ""
        self.tamper = tamper
        self._target = split_address(target)
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
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with suppress(asyncio.CancelledError, OSError):
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            with suppress(OSError, asyncio.IncompleteReadError):
                requests = asyncio.create_task(_copy(reader, there_writer))
                try:
                    await self._copy_replies(there_reader, writer)
                finally:
                    requests.cancel()
                    there_writer.transport.abort()
        writer.transport.abort()
        self._connections.discard(task)

    async def _copy_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(_GREETING_BYTES):  # byte by byte: each side waits for the other's first ones
            writer.write(await reader.readexactly(1))
        message: list[bytes] = []
        while True:
            flags, frame = await _read_frame(reader)
            if flags & _COMMAND:
                writer.write(_pack(flags, frame))
                continue
            message.append(frame)
            if flags & _MORE:
                continue
            for changed in self.tamper(tuple(message)):
                for index, part in enumerate(changed):
                    writer.write(_pack(_MORE * (index + 1 < len(changed)), part))
            message.clear()
            await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    (flags,) = await reader.readexactly(1)
    length = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    return flags, await reader.readexactly(length)


def _pack(flags: int, frame: bytes) -> bytes:
    if len(frame) > 255:
        return bytes([flags | _LONG]) + len(frame).to_bytes(8, "big") + frame
    return bytes([flags & ~_LONG, len(frame)]) + frame
