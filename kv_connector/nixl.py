"""Blocks through NIXL: over UCX, whose transports (shared memory, RDMA, TCP) it chooses by itself or by UCX_TLS.

    pip install 'kvasir[nixl]'

UCX listens on ports of its own, on the interfaces that UCX_NET_DEVICES names (default: all).
"""

import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.one_sided import OneSidedConnector
from kvasir.kv_connector.one_sided_engine import Pool
from kvasir.kv_connector.settings import ConnectorSettings

_POLL_S = 0.0005
_FIRST_READ_TIMEOUT_S = 5.0
# The package `nixl` is a door to the other two, of which either will do where no CUDA is used.
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")


class NixlConnector(OneSidedConnector):
    name = "nixl"

    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(settings, NixlEngine(_load()))


class NixlEngine:
    """One agent, for what is lent and for what is read."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._agent: Any = None
        self._registered: Any = None

    def open(self, lent: Pool | None) -> bytes:
        sync_mode = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # each link has a thread of its own
        config = self._api.nixl_agent_config(backends=["UCX"], sync_mode=sync_mode)
        self._agent = self._api.nixl_agent(uuid.uuid4().hex, config)
        if lent is not None:
            self._registered = self._agent.register_memory([(lent.address, lent.num_bytes, 0, "")], "DRAM")
        return bytes(self._agent.get_agent_metadata())

    def connect(self, description: bytes, remote: Pool, local: Pool) -> "NixlChannel":
        return NixlChannel(self._agent, description, remote, local)

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None


class NixlChannel:
    """Both pools are described to NIXL once, and a read names blocks by their numbers: describing 4096 blocks takes
    tens of milliseconds, naming them a fraction of one."""

    def __init__(self, agent: Any, description: bytes, remote: Pool, local: Pool) -> None:
        self._agent = agent
        self._registered = agent.register_memory([(local.address, local.num_bytes, 0, "")], "DRAM")
        self._peer = agent.add_remote_agent(description)
        self._remote = agent.prep_xfer_dlist(self._peer, _blocks(remote), "DRAM")
        self._local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _blocks(local), "DRAM")
        self.read([0], [0], _FIRST_READ_TIMEOUT_S)  # UCX connects when something is read, and not before

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s  # UCX itself waits for ever for a peer that is frozen or cut off
        handle = self._agent.make_prepped_xfer("READ", self._local, list(local), self._remote, list(remote))
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise KVTransferError(f"{len(local)} blocks were not there within {timeout_s:.1f} s")
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise KVTransferError(f"NIXL says {state}")
        finally:
            self._agent.release_xfer_handle(handle)  # also ends a read that is still under way

    def close(self) -> None:
        self._agent.release_dlist_handle(self._remote)
        self._agent.release_dlist_handle(self._local)
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)


def _blocks(pool: Pool) -> Any:
    """NIXL's short form for blocks at equal distances: address, length, device, distance, how many."""
    return np.array([[pool.address, pool.block_bytes, 0, pool.block_bytes, pool.num_blocks]], np.uint64)


def _load() -> Any:
    errors = []
    for name in _MODULES:
        try:
            return import_module(name)
        except ImportError as error:
            errors.append(str(error))
    raise ModuleNotFoundError(
        f"connector nixl needs NIXL: pip install 'kvasir[nixl]' ({'; '.join(errors)})", name="nixl"
    )
