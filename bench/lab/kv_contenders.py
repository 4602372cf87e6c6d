"""Who is compared with whom, and each as a pair of processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

import kvasir
from kvasir.bench.lab.kv_pipe import Process
from kvasir.bench.lab.kv_report import Movement
from kvasir.cli.local_redis import ADVICE, find_server
from kvasir.cli.ports import free_ports
from kvasir.engine.blocks import KVLayout

_START_TIMEOUT_S = 10.0
_SECRET = "a secret of the benchmark"


@dataclass(frozen=True, slots=True)
class Size:
    layout: KVLayout
    num_blocks: int  # 64 MiB of them

    def with_blocks(self, num_blocks: int) -> "Size":
        return replace(self, num_blocks=num_blocks)


SIZES = {
    "720 KiB": Size(  # a block of the built-in model
        KVLayout(num_layers=30, num_kv_heads=3, total_kv_heads=3, head_dim=64, block_size=16, dtype="float32"), 91
    ),
    "64 KiB": Size(
        KVLayout(num_layers=8, num_kv_heads=1, total_kv_heads=1, head_dim=64, block_size=16, dtype="float32"), 1024
    ),
}


@dataclass(frozen=True, slots=True)
class Places:
    """What contenders may use, and what else has been installed where."""

    folder: Path
    redis_url: str
    pythons: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    name: str
    module: str  # below kvasir.bench.lab
    task: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "plain"  # "ours"; "plain": the fastest of them is what ours is compared with; "other"
    wants: str = ""  # the key of its interpreter in `Places.pythons`
    environment: Mapping[str, str] = field(default_factory=dict)
    is_never_idle: bool = False  # its threads compute while they wait


def ours(name: str, connector: str, **settings: Any) -> Contender:
    return Contender(name=name, module="kv_connectors", kind="ours", task={"settings": {"name": connector, **settings}})


def plain(name: str, way: str, kind: str = "plain") -> Contender:
    return Contender(name=name, module="kv_plain", task={"way": way}, kind=kind)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    target: float  # least ratio to the fastest plain way
    contenders: tuple[Contender, ...]

    def present(self, places: Places) -> list[Contender]:
        return [contender for contender in self.contenders if not contender.wants or places.pythons[contender.wants]]


def encrypted(name: str, connector: str) -> Contender:
    settings = {"settings": {"name": connector, "encryption": True}}
    return Contender(name=name, module="kv_connectors", kind="other", task=settings)


def other(name: str, engine: str, **environment: str) -> Contender:
    quiet = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
    return Contender(
        name=name,
        module="kv_engines",
        kind="other",
        task={"engine": engine},
        wants=engine,
        environment=quiet | environment,
        is_never_idle=True,
    )


_LARGE_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}

CASES = {
    case.name: case
    for case in (
        Case(
            "tcp",
            0.9,
            (
                ours("tcp", "tcp"),
                encrypted("tcp, encrypted", "tcp"),
                plain("zmq, pushed", "zmq_push"),
                plain("zmq, pushed, no high-water mark", "zmq_push_unbounded"),
                plain("zmq, asked for", "zmq_pull"),
                other("nixl", "nixl", UCX_TLS="tcp"),
                other("nixl, segments of 1 MiB", "nixl", UCX_TLS="tcp", **_LARGE_SEGMENTS),
                other("mooncake", "mooncake"),
            ),
        ),
        Case(
            "redis",
            0.9,
            (
                ours("redis", "redis"),
                plain("redis-py", "redis_client"),
                plain("redis-py, pipelines", "redis_pipeline"),
                plain("a socket", "redis_socket"),
            ),
        ),
        Case(
            "shared_storage",
            0.8,
            (
                ours("shared_storage", "shared_storage"),
                plain("a new file, mapped", "new_mapped_file"),
                plain("a new file for each block", "files", kind="other"),
                plain("a file kept mapped", "kept_mapped_file", kind="other"),
            ),
        ),
    )
}


class Mover:
    """A contender's two processes. Idle but for `move`: where threads look for work all the time, they are stopped."""

    def __init__(
        self, contender: Contender, size: Size, places: Places, of_receiver: Mapping[str, Any] | None = None
    ) -> None:
        """`of_receiver`: settings that it has for itself."""
        self.contender = contender
        python = places.pythons[contender.wants] if contender.wants else sys.executable
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
        if self.contender.is_never_idle:
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
    (port,) = free_ports(1)
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
