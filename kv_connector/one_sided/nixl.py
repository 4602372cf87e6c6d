"""Blocks through NIXL over UCX, which picks a transport (shared memory, RDMA, TCP) by itself, or as UCX_TLS says.

    pip install '.[nixl]'      in this project's folder

UCX listens on ports of its own, on the network interfaces that UCX_NET_DEVICES names.
"""

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from kvasir.common.errors import KVTransferError
from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.one_sided.connector import OneSidedConnector
from kvasir.kv_connector.one_sided.engine import Pool
from kvasir.kv_connector.settings import ConnectorSettings

_POLL_S = 0.0005
_IDLE_S = 0.01
_HANGING_POLL_S = 0.05
# The package `nixl` forwards to one of the other two; either will do where no CUDA is used.
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")


class NixlConnector(OneSidedConnector):
    name = "nixl"

    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(settings, NixlEngine(_load()))
        if is_loopback(settings.listen_host):  # or UCX would listen on all interfaces
            os.environ.setdefault("UCX_NET_DEVICES", "lo")


class NixlEngine:
    """One NIXL agent, both for lending and for reading.

    NIXL's own progress thread would keep a core busy for as long as the node runs. Ours drives UCX often while anything
    is lent, and only now and then otherwise.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._is_lending = threading.Event()
        self.agent: Any = None
        self._registered: Any = None
        self.is_closing = threading.Event()
        self._lock = threading.Lock()
        self._num_channels: Counter[str] = Counter()  # by peer

    def open(self, lent: Pool | None) -> bytes:
        sync_mode = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # each link has a thread of its own
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync_mode)
        self.agent = self._api.nixl_agent(uuid.uuid4().hex, config)
        if lent is not None:
            self._registered = self.agent.register_memory([(lent.address, lent.num_bytes, 0, "")], "DRAM")
        threading.Thread(target=self._progress, args=(self.agent,), name="kv-nixl", daemon=True).start()
        return bytes(self.agent.get_agent_metadata())

    def lending(self, is_lending: bool) -> None:
        if is_lending:
            self._is_lending.set()
        else:
            self._is_lending.clear()

    def _progress(self, agent: Any) -> None:
        while not self.is_closing.is_set():
            if self._is_lending.wait(_IDLE_S):
                time.sleep(_POLL_S)
            agent.get_new_notifs()  # makes UCX serve pending reads

    def connect(self, description: bytes, remote: Pool, local: Pool) -> "NixlChannel":
        with self._lock:  # NIXL knows a peer once; it is removed with its last channel
            peer = self.agent.add_remote_agent(description)
            self._num_channels[peer] += 1
        return NixlChannel(self, peer, remote, local)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._num_channels[peer] -= 1
            if not self._num_channels[peer]:
                self.agent.remove_remote_agent(peer)

    def close(self) -> None:
        self.is_closing.set()
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
        self.agent = self._registered = None


class NixlChannel:
    """Describes both pools to NIXL once; a read then names blocks by their index.

    Describing 4096 blocks takes tens of milliseconds, naming them a fraction of one.
    """

    def __init__(self, engine: NixlEngine, peer: str, remote: Pool, local: Pool) -> None:
        self._engine = engine
        self._agent = agent = engine.agent
        self._peer = peer
        self._registered = agent.register_memory([(local.address, local.num_bytes, 0, "")], "DRAM")
        self._remote = agent.prep_xfer_dlist(self._peer, _blocks(remote), "DRAM")
        self._local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _blocks(local), "DRAM")
        self._hanging: Any = None

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        """With a time limit of our own: UCX would wait for ever for a peer that is frozen or cut off."""
        handle = self._agent.make_prepped_xfer("READ", self._local, list(local), self._remote, list(remote))
        state = self._agent.transfer(handle)
        deadline_s = time.monotonic() + timeout_s
        while state == "PROC" and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            self._hanging = handle
            raise KVTransferError(f"{len(local)} blocks were not there within {timeout_s:.1f} s")
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KVTransferError(f"NIXL says {state}")

    def close(self) -> None:
        """Wait for a read that hangs. Releasing its handle and removing its peer would not help: its bytes would still
        be written here when the peer goes on."""
        while self._hanging is not None and self._is_under_way(self._hanging):
            if self._engine.is_closing.wait(_HANGING_POLL_S):
                raise KVTransferError("closed while a read hangs")
        self._agent.release_dlist_handle(self._remote)
        self._agent.release_dlist_handle(self._local)
        self._engine.disconnect(self._peer)
        self._agent.deregister_memory(self._registered)

    def _is_under_way(self, handle: Any) -> bool:
        try:
            return bool(self._agent.check_xfer_state(handle) == "PROC")
        except Exception:  # how NIXL reports that the peer is gone, and the read with it
            return False


def _blocks(pool: Pool) -> Any:
    """NIXL's short form for equally spaced blocks: address, length, device, stride, count. [1, 5] uint64"""
    return np.array([[pool.address, pool.block_bytes, 0, pool.block_bytes, pool.num_blocks]], np.uint64)


def _load() -> Any:
    errors = []
    for name in _MODULES:
        try:
            api = import_module(name)
        except ImportError as error:
            errors.append(str(error))
        else:
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
    raise ModuleNotFoundError(
        f"connector nixl needs NIXL: pip install '.[nixl]' in the project's folder ({'; '.join(errors)})", name="nixl"
    )
