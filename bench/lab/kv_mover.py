"""A contender as a pair of processes; and the server that some of them need."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

import kvasir
from kvasir.bench.lab.kv_cases import Contender, Places, Size
from kvasir.bench.lab.kv_pipe import Process
from kvasir.bench.lab.kv_report import Movement
from kvasir.cli.local_redis import ADVICE, find_server
from kvasir.cli.ports import free_port

_START_TIMEOUT_S = 10.0
_SECRET = "a secret of the benchmark"


class Mover:
    """A contender's two processes. Idle but for `move`: where threads look for work all the time, they are stopped."""

    def __init__(
        self, contender: Contender, size: Size, places: Places, of_receiver: Mapping[str, Any] | None = None
    ) -> None:
        """`of_receiver`: settings that it has for itself."""
        self.contender = contender
        python = places.pythons[contender.peer] if contender.peer else sys.executable
        task = {
            **contender.task,
            "num_blocks": size.num_blocks,
            "block_bytes": size.layout.bytes_per_block,
            "layout": asdict(size.layout),
            "url": places.redis_url,
            "path": str(places.folder),
        }
        if "settings" in task:
            stores = {"redis_url": places.redis_url or "redis://", "path": str(places.folder / "store")}
            task["settings"] = {"secret": _SECRET, **stores, **task["settings"]}
        source = Path(kvasir.__file__).parent.parent
        environment = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", **contender.environment}
        command = [python, "-m", f"kvasir.bench.lab.{contender.module}"]
        self._sender = Process([*command, "send", json.dumps(task)], environment)
        self._receiver: Process | None = None
        try:
            task |= self._sender.greet()
            if of_receiver:
                task["settings"] = task["settings"] | of_receiver
            self._receiver = Process([*command, "receive", json.dumps(task)], environment)
            self._receiver.greet()
        except RuntimeError:
            self.close()
            raise
        self._pause()

    @property
    def name(self) -> str:
        return self.contender.name

    def move(self) -> Movement:
        """All blocks once. That they came as they were is not part of what is timed."""
        assert self._receiver is not None, "started with it"
        os.sync()  # what others have written before is on its disk, and takes no more of this one's time
        self._resume()
        self._receiver.ask("clear")
        cpu_s = self._cpu_s()
        offer = self._sender.ask("offer")
        write_s = offer.pop("s")
        taken = self._receiver.ask("take", **offer)
        cpu_s = self._cpu_s() - cpu_s
        found = self._receiver.ask("checksum")["checksum"]
        if taken["missing"] or found != self._sender.greeting["checksum"]:
            raise RuntimeError(f"{self.name}: {taken['missing']} blocks are missing, or others than were sent")
        self._sender.ask("discard")
        self._pause()
        return Movement(write_s, taken["s"], cpu_s)

    def fetch(self, num_blocks: int, compute_s_a_token: float) -> tuple[float, int]:
        """Of a store, the first blocks alone: how long it took, and how many were given up for computing."""
        assert self._receiver is not None, "started with it"
        offer = self._sender.ask("offer")
        offer["keys"] = offer["keys"][:num_blocks]
        del offer["s"]
        taken = self._receiver.ask("take", **offer, compute_s_a_token=compute_s_a_token)
        self._sender.ask("discard")
        return taken["s"], taken["missing"]

    def close(self) -> None:
        for process in self._processes:
            process.close()

    @property
    def _processes(self) -> list[Process]:
        return [process for process in (self._receiver, self._sender) if process is not None]

    def _pause(self) -> None:
        if self.contender.peer:
            for process in self._processes:
                process.pause()

    def _resume(self) -> None:
        for process in self._processes:
            process.resume()

    def _cpu_s(self) -> float:
        assert self._receiver is not None, "started with it"
        return self._sender.cpu_s() + self._receiver.cpu_s()


@contextmanager
def local_server(folder: Path) -> Iterator[str]:
    """A Redis-compatible server that keeps nothing on disk; its URL."""
    server = find_server()
    if server is None:
        raise RuntimeError(ADVICE)
    port = free_port()
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{server} does not answer")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with redis.Redis(port=port, socket_timeout=1.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
