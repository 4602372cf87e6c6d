"""A Redis-compatible server of our own for a test: on a free port, in memory only, gone at the end."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from kvasir.cli.local_redis import ADVICE, find_server
from tests.ports import held_port

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class RedisServer:
    """Options are the server's own: RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")  # a server begins with what another saved there
        self._held = ExitStack()
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._held.close()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Also after a stop or a kill: then on the same port, and empty."""
        if self._process is not None:
            return
        self.port = self.port or self._held.enter_context(held_port())
        server = find_server()
        assert server is not None, ADVICE
        command = [server, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                self._process = None
                raise RuntimeError(f"the Redis server has ended with status {status}")
            if _who_answers(self.port) == self._process.pid:
                return
            time.sleep(0.02)
        self.kill()
        raise TimeoutError(f"the Redis server did not answer on port {self.port} within {START_TIMEOUT_S} s")

    def stop(self) -> None:
        """As an administrator stops it: connections are closed, then it ends."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing; the kernel still accepts for it."""
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)  # a frozen one would never see SIGTERM
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process = None


def _who_answers(port: int) -> int | None:
    """The process id of the Redis server on that port."""
    with redis.Redis(port=port, socket_timeout=1.0) as client:
        try:
            return int(client.info("server")["process_id"])
        except redis.RedisError:
            return None
