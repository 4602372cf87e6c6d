"""A TCP proxy whose connections a test can cut."""

import asyncio
from contextlib import suppress


class TcpProxy:
    """`async with TcpProxy(target) as proxy`; clients connect to `proxy.address`."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_connections = 0

    async def __aenter__(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Every connection breaks, with whatever is on its way."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # nobody there: neither is there here
            writer.transport.abort()
            return
        for pair in ((reader, there_writer), (there_reader, writer)):
            self._writers.add(pair[1])
            task = asyncio.create_task(self._copy(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
