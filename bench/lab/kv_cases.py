"""Who is compared with whom, and on blocks of which size."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.engine.blocks import KVLayout

PEERS = ("nixl", "mooncake")  # other projects' engines, each with an interpreter of its own


@dataclass(frozen=True, slots=True)
class Size:
    layout: KVLayout
    num_blocks: int  # 64 MiB of them


def _layout(num_layers: int, num_kv_heads: int) -> KVLayout:
    return KVLayout(
        num_layers=num_layers, num_kv_heads=num_kv_heads, total_kv_heads=num_kv_heads,
        head_dim=64, block_size=16, dtype="float32",
    )  # fmt: skip


SIZES = {
    "720 KiB": Size(_layout(30, 3), 91),  # a block of the built-in model
    "64 KiB": Size(_layout(8, 1), 1024),
}


@dataclass(frozen=True, slots=True)
class Places:
    """What contenders may use."""

    folder: Path
    redis_url: str
    pythons: Mapping[str, str]  # of PEERS; "": not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    name: str
    module: str  # below kvasir.bench.lab
    task: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "plain"  # "ours"; "plain": the fastest of them is what ours is compared with; "other"
    peer: str = ""  # one of PEERS, whose threads compute while they wait
    environment: Mapping[str, str] = field(default_factory=dict)


def ours(name: str, connector: str, kind: str = "ours", **settings: Any) -> Contender:
    return Contender(name=name, module="kv_connectors", kind=kind, task={"settings": {"name": connector, **settings}})


def plain(name: str, way: str, kind: str = "plain") -> Contender:
    return Contender(name=name, module="kv_plain", kind=kind, task={"way": way})


def other(name: str, peer: str, **environment: str) -> Contender:
    quiet = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
    environment = quiet | environment
    return Contender(
        name=name, module="kv_engines", kind="other", task={"way": peer}, peer=peer, environment=environment
    )


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    target: float  # least ratio to the fastest plain way
    contenders: tuple[Contender, ...]

    def present(self, places: Places) -> list[Contender]:
        return [contender for contender in self.contenders if not contender.peer or places.pythons[contender.peer]]


_LARGE_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
_TCP = Case(
    "tcp",
    0.9,
    (
        ours("tcp", "tcp"),
        ours("tcp, encrypted", "tcp", kind="other", encryption=True),
        plain("zmq, pushed", "zmq_push"),
        plain("zmq, pushed, no high-water mark", "zmq_push_unbounded"),
        plain("zmq, asked for", "zmq_pull"),
        other("nixl", "nixl", UCX_TLS="tcp"),
        other("nixl, segments of 1 MiB", "nixl", UCX_TLS="tcp", **_LARGE_SEGMENTS),
        other("mooncake", "mooncake"),
    ),
)
_REDIS = Case(
    "redis",
    0.9,
    (
        ours("redis", "redis"),
        plain("redis-py", "redis_client"),
        plain("redis-py, pipelines", "redis_pipeline"),
        plain("a socket", "redis_socket"),
    ),
)
_SHARED_STORAGE = Case(
    "shared_storage",
    0.8,
    (
        ours("shared_storage", "shared_storage"),
        plain("a new file, mapped", "new_mapped_file"),
        plain("a new file for each block", "files", kind="other"),
        plain("a file kept mapped", "kept_mapped_file", kind="other"),
    ),
)
CASES = {case.name: case for case in (_TCP, _REDIS, _SHARED_STORAGE)}
