"""An engine for one-sided connectors that the kernel has built in: `process_vm_readv`, for nodes of one machine."""

import ctypes
import os
import threading
from collections.abc import Sequence

from kvasir.kv_connector.one_sided.connector import OneSidedConnector
from kvasir.kv_connector.one_sided.engine import Pool
from kvasir.kv_connector.settings import ConnectorSettings

_libc = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class CmaEngine:
    def __init__(self) -> None:
        self.may_read = threading.Event()  # cleared: reads hang
        self.may_read.set()
        self.num_closed = 0  # channels

    def open(self, lent: Pool | None) -> bytes:
        return str(os.getpid()).encode()

    def lending(self, is_lending: bool) -> None:
        self.is_lending = is_lending

    def connect(self, description: bytes, remote: Pool, local: Pool) -> "CmaChannel":
        return CmaChannel(self, int(description), remote, local)

    def close(self) -> None:
        self.may_read.set()


class CmaChannel:
    def __init__(self, engine: CmaEngine, pid: int, remote: Pool, local: Pool) -> None:
        self._engine = engine
        self._pid = pid
        self._remote = remote
        self._local = local

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        self._engine.may_read.wait()
        for theirs, ours in zip(remote, local, strict=True):
            here = _Piece(self._local.address_of(ours), self._local.block_bytes)
            there = _Piece(self._remote.address_of(theirs), self._remote.block_bytes)
            if _libc.process_vm_readv(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != there.length:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

    def close(self) -> None:
        self._engine.num_closed += 1


class CmaConnector(OneSidedConnector):
    name = "tests.cma:CmaConnector"

    def __init__(self, settings: ConnectorSettings) -> None:
        self.engine = CmaEngine()
        super().__init__(settings, self.engine)
