"""Work that may take long, or take its process down, is done in one of its own: a frame of bytes asks, a frame answers.

A frame is 4 bytes of length, little-endian, and content. The process says that it is ready with a first frame, and ends
with its stdin.
"""

import asyncio
import os
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import IO

from kvasir.common.own_time import own_timeout

_START_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 1 << 30
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TZ")  # no keys and no secrets


class FramedProcess:
    """`python -m` a module of ours. To be ended, whatever happens: an answer left unread would be the next one's."""

    def __init__(self, process: Process, ready: bytes) -> None:
        self._process = process
        self.ready = ready  # its first frame

    @classmethod
    async def start(cls, module: str, *arguments: str) -> "FramedProcess":
        """Raises TimeoutError, EOFError or OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a library's panics, at a stranger's will
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        started = cls(process, b"")
        try:
            async with own_timeout(_START_TIMEOUT_S):
                started.ready = await started._read()
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, *parts: bytes) -> bytes:
        """The answer to a frame of these parts. Raises EOFError or OSError if the process ends."""
        assert self._process.stdin is not None, "asked for as a pipe"
        self._process.stdin.writelines((struct.pack("<I", sum(map(len, parts))), *parts))
        await self._process.stdin.drain()
        return await self._read()

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _read(self) -> bytes:
        assert self._process.stdout is not None, "asked for as a pipe"
        [length] = struct.unpack("<I", await self._process.stdout.readexactly(4))
        if length > _MAX_ANSWER_BYTES:
            raise EOFError
        return await self._process.stdout.readexactly(length)


# The other end.


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None at the end."""
    header = stream.read(4)
    return stream.read(*struct.unpack("<I", header)) if len(header) == 4 else None


def write_frame(stream: IO[bytes], content: bytes) -> None:
    stream.write(struct.pack("<I", len(content)) + content)
    stream.flush()
