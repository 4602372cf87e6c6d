"""One process of the cluster: started on a leash, its lines shown under its name, stopped or killed."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_KEPT_LINES = 30
# As a file, isolated and without site-packages: it starts in milliseconds.
_LEASH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("leash.py")))
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How a process is started, and where it says that it is well."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: tuple[str, int] | None = None  # host and port of HTTP, where /health says that it is up
    stop_order: int = 0  # lower is stopped earlier
    can_restart: bool = True


@dataclass(eq=False)
class Child:
    spec: ChildSpec
    show: Callable[[str, str], None]  # a name and a line of output
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    started_s: float = 0.0
    _process: asyncio.subprocess.Process | None = None
    _output: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.lines.clear()
        self.started_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *_LEASH,
            str(os.getpid()),
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.spec.environment),
            start_new_session=True,  # a Ctrl-C at the terminal is for us alone; we stop the others in order
        )
        assert self._process.stdout is not None, "asked for as a pipe"
        self._output = asyncio.create_task(self._read(self._process.stdout))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """The exit status, once all output has been read."""
        if self._process is None or self._output is None:
            raise RuntimeError(f"{self.spec.name} was never started")
        status = await self._process.wait()
        # A grandchild may still hold the pipe.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._output), 1.0)
        return status

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL when the grace time is over. False if it came to that."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()
            return False
        return True

    def send(self, signal_number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal_number)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
            if len(rest) > _READ_BYTES:  # no line is that long: show what there is
                self._take(rest)
                rest = b""
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.lines.append(text)
        self.show(self.spec.name, text)


def describe_exit(status: int) -> str:
    """-9 -> "killed by SIGKILL"; 3 -> "exit status 3" """
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
