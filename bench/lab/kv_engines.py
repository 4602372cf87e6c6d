"""Other projects' transfer engines, over TCP: `python -m kvasir.bench.lab.kv_engines send|receive JSON`.

{"way": "nixl" or "mooncake", "num_blocks", "block_bytes"}. The receiver reads all blocks out of the sender's memory
into its own. Run by an interpreter that has the engine.
"""

import base64
import ctypes
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from kvasir.bench.lab.kv_way import Pool, Way, run_way

_POLL_S = 0.0005  # faster than spinning, where cores are few
_MOST_DESCRIPTORS = 512  # Mooncake refuses batches of many more


def _address(pool: Pool) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pool.memory))


class Nixl(Way):
    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        api = _import_any("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
        self._agent = api.nixl_agent(str(os.getpid()), api.nixl_agent_config(True, False, 0, backends=["UCX"]))
        self._agent.register_memory([(_address(pool), pool.memory.nbytes, 0, "")], "DRAM")

    def listen(self) -> str:
        return f"{_address(self.pool)} {base64.b64encode(self._agent.get_agent_metadata()).decode()}"

    def connect(self, address: str) -> None:
        pool, (peers_base, metadata) = self.pool, address.split()
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._agent.make_connection(peer)
        starts = range(0, pool.memory.nbytes, pool.block_bytes)
        here, there = (
            [(base + at, pool.block_bytes, 0) for at in starts] for base in (_address(pool), int(peers_base))
        )
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        self._there = self._agent.prep_xfer_dlist(peer, there, "DRAM")

    def take(self) -> None:
        blocks = list(range(self.pool.num_blocks))
        handle = self._agent.make_prepped_xfer("READ", self._here, blocks, self._there, blocks)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")


class Mooncake(Way):
    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        self._engine = import_module("mooncake.engine").TransferEngine()
        _succeed(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        _succeed(self._engine.register_memory(_address(pool), pool.memory.nbytes))

    def listen(self) -> str:
        return f"{_address(self.pool)} 127.0.0.1:{self._engine.get_rpc_port()}"

    def connect(self, address: str) -> None:
        there, self._peer = address.split()
        self._there = int(there)

    def take(self) -> None:
        size, num_blocks = self.pool.block_bytes, self.pool.num_blocks
        for start in range(0, num_blocks, _MOST_DESCRIPTORS):
            starts = [index * size for index in range(start, min(start + _MOST_DESCRIPTORS, num_blocks))]
            here, there = ([base + at for at in starts] for base in (_address(self.pool), self._there))
            _succeed(self._engine.batch_transfer_sync_read(self._peer, here, there, [size] * len(starts)))


def _import_any(*names: str) -> Any:
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(names)} is installed for {sys.executable}")


def _succeed(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake answered {code}")


if __name__ == "__main__":
    run_way({"nixl": Nixl, "mooncake": Mooncake}, sys.argv[1], json.loads(sys.argv[2]))
    os._exit(0)  # the engines' threads do not always end
