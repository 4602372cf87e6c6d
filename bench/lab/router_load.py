"""Streams that are read as cheaply as Python can, so that what is measured is not the reader."""

import asyncio
import re
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import cast

import orjson

from kvasir.bench.lab.router_clock import read_stamps

_TOKEN = re.compile(rb" (\d{4})")
_TEXT = b'"content":" '
_GOLDEN = 0.618034  # its multiples are spread evenly, however many there are
_KEPT = len(_TEXT) - 1  # bytes of what came last: the network may cut anywhere, and nothing whole counts twice


@dataclass
class Load:
    """What has come since `clear`."""

    num_tokens: int = 0
    num_events: int = 0
    delays_s: "array[float]" = field(default_factory=lambda: array("d"))  # from a token's tick to its arrival

    def clear(self) -> None:
        self.num_tokens = self.num_events = 0
        self.delays_s = array("d")


class _Stream(asyncio.Protocol):
    """Asks, reads to the end, asks again."""

    def __init__(
        self, requests: Iterator[bytes], load: Load, stamps: "memoryview[float]", on_lost: Callable[[Exception], None]
    ) -> None:
        self._requests = requests
        self._load = load
        self._stamps = stamps
        self._on_lost = on_lost
        self._rest = b""
        self._has_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(next(self._requests))

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(error or ConnectionError("the router has closed a connection"))

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        data = self._rest + data
        if not self._has_head:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not separator:
                self._rest = data
                return
            if b" 200 " not in head.partition(b"\r\n")[0]:
                self._on_lost(ConnectionError(f"the router answered: {data[:500]!r}"))
                return
            self._has_head, data = True, rest
        end = 0
        self._load.num_events += data.count(_TEXT)
        for match in _TOKEN.finditer(data):
            self._load.num_tokens += 1
            self._load.delays_s.append(now_s - self._stamps[int(match[1])])
            end = match.end()
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._has_head, self._rest = False, b""
            self._transport.write(next(self._requests))
        else:
            self._rest = data[max(end, len(data) - _KEPT) :]


class Streams:
    """`async with`: so many at once, for as long as it lasts."""

    def __init__(self, port: int, num_streams: int, num_tokens: int, stamps: Path) -> None:
        """Answers have `num_tokens` on average, but each stream another number, and its first answer is the rest of
        one: as many end and begin at all times, from the start on."""
        self._num_tokens = num_tokens
        self._port = port
        self._num_streams = num_streams
        self._stamps = read_stamps(stamps)
        self.load = Load()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transports: list[asyncio.BaseTransport] = []

    async def __aenter__(self) -> "Streams":
        loop = asyncio.get_running_loop()
        for number in range(self._num_streams):
            num_tokens = self._num_tokens * (0.5 + number / self._num_streams)
            requests = chain([_request(num_tokens * (number * _GOLDEN % 1))], repeat(_request(num_tokens)))
            transport, _ = await loop.create_connection(
                partial(_Stream, requests, self.load, self._stamps, self._fail), "127.0.0.1", self._port
            )
            self._transports.append(transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lost.cancel()
        for transport in self._transports:
            transport.close()
        await asyncio.sleep(0.1)

    async def watch(self, duration_s: float) -> float:
        """Counts anew for so long; the time that it was. Raises what has ended a stream."""
        self.load.clear()
        start_s = time.monotonic()
        await asyncio.wait([self.lost], timeout=duration_s)
        if self.lost.done():
            self.lost.result()
        return time.monotonic() - start_s

    def _fail(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)


def _request(num_tokens: float) -> bytes:
    body = orjson.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "max_tokens": max(1, round(num_tokens)),
            "ignore_eos": True,
            "temperature": 0,
        }
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
