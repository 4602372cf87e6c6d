"""The KV identity: a name for everything that the content of a KV block depends on, but for its dtype.

It is the root of the hash chain that names blocks, so blocks of two models, or of two versions of one, never meet.
The dtype is said by each block's header instead, and by its key where it is stored, so that nodes of different dtypes
can pair. The weights are read once; their digest is kept beside the model (or, where that cannot be written, in the
user's cache) under the files' names, sizes and times of change.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvasir.engine.blocks import KVLayout
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.loader import shard_paths

log = logging.getLogger(__name__)

_DIGEST_FILE = "kvasir-weights.json"
_READ_BYTES = 8 << 20


def kv_identity(directory: Path, config: ModelConfig, layout: KVLayout) -> bytes:
    """32 bytes."""
    described = {
        "config": dataclasses.asdict(config),
        "weights": weights_digest(directory),
        "block_size": layout.block_size,
    }
    return hashlib.sha256(b"kvasir-kv" + json.dumps(described, sort_keys=True).encode()).digest()


def weights_digest(directory: Path) -> str:
    """SHA-256 over every tensor's name, dtype, shape and content, however they are spread over files."""
    paths = shard_paths(directory)
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    kept_at = (directory / _DIGEST_FILE, _user_cache_path(directory))
    for path in kept_at:
        kept = _read_kept(path)
        if kept.get("files") == files and isinstance(kept.get("digest"), str):
            return str(kept["digest"])
    log.info("reading the weights in %s once for their digest", directory)
    digest = digest_of_tensors(paths)
    _keep(kept_at, {"files": files, "digest": digest})
    return digest


def digest_of_tensors(paths: Iterable[Path]) -> str:
    tensors: dict[str, tuple[str, list[int], str]] = {}
    for path in paths:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                file.seek(8 + header_bytes + first)
                tensors[name] = (entry["dtype"], entry["shape"], _digest_next(file, last - first))
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def _digest_next(file: Any, num_bytes: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(num_bytes, _READ_BYTES) or 1))
    while num_bytes > 0:
        count = file.readinto(buffer[: min(num_bytes, _READ_BYTES)])
        if count == 0:
            raise OSError(f"{file.name} ends in the middle of a tensor")
        digest.update(buffer[:count])
        num_bytes -= count
    return digest.hexdigest()


def _user_cache_path(directory: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    return Path(base) / "kvasir" / "digests" / f"{name}.json"


def _read_kept(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(places: Iterable[Path], content: dict[str, Any]) -> None:
    """In the first place that can be written; whole or not at all, since other nodes may read it now."""
    for path in places:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(content))
            aside.replace(path)
        except OSError:
            with suppress(OSError):  # a folder that is read-only refuses this too
                aside.unlink(missing_ok=True)
            continue
        return
    log.warning("the digest of the weights could not be kept; the next start will read them again")
