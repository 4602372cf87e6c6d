"""Blocks through Mooncake's transfer engine, over TCP.

    pip install '.[mooncake]'      in this project's folder; it also needs libibverbs1, which its library links to

It chooses its ports by itself, and listens on all network interfaces.
"""

import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.one_sided.connector import OneSidedConnector
from kvasir.kv_connector.one_sided.engine import Pool
from kvasir.kv_connector.settings import ConnectorSettings

_MAX_PIECES = 64  # in one call
# The engine has a few connections to a peer. Each gives up a piece after 30 s without progress, then begins the next.
_GIVES_UP_S = 600.0


class MooncakeConnector(OneSidedConnector):
    name = "mooncake"

    def __init__(self, settings: ConnectorSettings) -> None:
        host = settings.advertise_host or settings.listen_host
        super().__init__(settings, MooncakeEngine(_load(), host))


class MooncakeEngine:
    """One transfer engine, both for lending and for reading."""

    def __init__(self, transfer_engine: Any, host: str) -> None:
        self._make_engine = transfer_engine
        self._host = host
        self._engine: Any = None
        self._lent: Pool | None = None
        self._is_closing = threading.Event()

    def open(self, lent: Pool | None) -> bytes:
        self._engine = self._make_engine()
        _check(self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        if lent is not None:
            _check(self._engine.register_memory(lent.address, lent.num_bytes), "register_memory")
            self._lent = lent
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def lending(self, is_lending: bool) -> None:
        """Nothing to do: the engine serves reads on threads of its own."""

    def connect(self, description: bytes, remote: Pool, local: Pool) -> "MooncakeChannel":
        return MooncakeChannel(self._engine, self._is_closing, description.decode(), remote, local)

    def close(self) -> None:
        self._is_closing.set()
        if self._lent is not None:
            self._engine.unregister_memory(self._lent.address)
        self._engine = self._lent = None


class MooncakeChannel:
    def __init__(self, engine: Any, is_closing: threading.Event, peer: str, remote: Pool, local: Pool) -> None:
        self._engine = engine
        self._is_closing = is_closing
        self._has_failed = False
        self._peer = peer
        self._remote = remote
        self._local = local
        _check(engine.register_memory(local.address, local.num_bytes), "register_memory")

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        """`timeout_s` is not used: the engine's own limit is half a minute, and the caller stops waiting sooner."""
        pieces = list(runs(remote, local))
        size = self._local.block_bytes
        for start in range(0, len(pieces), _MAX_PIECES):
            some = pieces[start : start + _MAX_PIECES]
            status = self._engine.batch_transfer_sync_read(
                self._peer,
                [self._local.address_of(ours) for _, ours, _ in some],
                [self._remote.address_of(theirs) for theirs, _, _ in some],
                [length * size for _, _, length in some],
            )
            self._has_failed |= status != 0
            _check(status, f"reading {len(some)} pieces from {self._peer}")

    def close(self) -> None:
        """Bytes of a failed read may still arrive, and the engine does not say which: wait until it has given up."""
        if self._has_failed and self._is_closing.wait(_GIVES_UP_S):
            raise KVTransferError("closed soon after a read failed")
        self._engine.unregister_memory(self._local.address)


def runs(remote: Sequence[int], local: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Join blocks that are neighbours on both sides, since small pieces are slow. (first remote, first local, count)

    remote [4, 5, 6, 9], local [0, 1, 2, 3]  ->  (4, 0, 3), (9, 3, 1)
    """
    start = 0
    for i in range(1, len(remote) + 1):
        if i == len(remote) or (remote[i] - remote[i - 1], local[i] - local[i - 1]) != (1, 1):
            yield remote[start], local[start], i - start
            start = i


def _check(status: int, what: str) -> None:
    if status != 0:
        raise KVTransferError(f"Mooncake: {what} failed with status {status}")


def _load() -> Any:
    try:
        return import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise ModuleNotFoundError(
            f"connector mooncake needs Mooncake's transfer engine: pip install '.[mooncake]' in the project's "
            f"folder, and the library libibverbs1 ({error})",
            name="mooncake",
        ) from error
