"""Other projects' transfer engines, over TCP: `python -m kvasir.bench.lab.kv_engines send|receive JSON`.

{"engine": "nixl" or "mooncake", "num_blocks", "block_bytes"}. The receiver reads all blocks out of the sender's memory
into its own. Run by an interpreter that has the engine; of ours only what needs the standard library is imported.
"""

import base64
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvasir.bench.lab.kv_pipe import Answer, Teller, checksum, serve, touched_memory

_POLL_S = 0.0005  # faster than spinning, where cores are few
_MOST_DESCRIPTORS = 512  # Mooncake refuses batches of many more


class Pool:
    """Blocks side by side, in memory that is there; its address."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.num_blocks: int = task["num_blocks"]
        self.block_bytes: int = task["block_bytes"]
        self.mapped = touched_memory(self.num_blocks * self.block_bytes)
        self.memory = memoryview(self.mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))

    def clear(self) -> Answer:
        self.memory[:] = bytes(self.memory.nbytes)
        return {}

    def checksum(self) -> Answer:
        return {"checksum": checksum(self.memory)}

    def fill(self) -> int:
        self.memory[:] = os.urandom(self.memory.nbytes)
        return checksum(self.memory)


class Nixl:
    def __init__(self, pool: Pool) -> None:
        api = _import_any("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
        self._pool = pool
        self._agent = api.nixl_agent(str(os.getpid()), api.nixl_agent_config(True, False, 0, backends=["UCX"]))
        self._agent.register_memory([(pool.address, pool.memory.nbytes, 0, "")], "DRAM")

    def listen(self) -> Answer:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._pool.address}

    def connect(self, metadata: str, address: int) -> None:
        pool = self._pool
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._agent.make_connection(peer)
        starts = range(0, pool.memory.nbytes, pool.block_bytes)
        self._there = self._agent.prep_xfer_dlist(peer, [(address + at, pool.block_bytes, 0) for at in starts], "DRAM")
        here = [(pool.address + at, pool.block_bytes, 0) for at in starts]
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")

    def take(self) -> None:
        blocks = list(range(self._pool.num_blocks))
        handle = self._agent.make_prepped_xfer("READ", self._here, blocks, self._there, blocks)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")


class Mooncake:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._engine = import_module("mooncake.engine").TransferEngine()
        _succeed(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        _succeed(self._engine.register_memory(pool.address, pool.memory.nbytes))

    def listen(self) -> Answer:
        return {"peer": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._pool.address}

    def connect(self, peer: str, address: int) -> None:
        self._peer, self._there = peer, address

    def take(self) -> None:
        size, num_blocks = self._pool.block_bytes, self._pool.num_blocks
        for start in range(0, num_blocks, _MOST_DESCRIPTORS):
            starts = [index * size for index in range(start, min(start + _MOST_DESCRIPTORS, num_blocks))]
            here, there = ([base + at for at in starts] for base in (self._pool.address, self._there))
            _succeed(self._engine.batch_transfer_sync_read(self._peer, here, there, [size] * len(starts)))


ENGINES: dict[str, Callable[[Pool], Nixl | Mooncake]] = {"nixl": Nixl, "mooncake": Mooncake}


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


def main(role: str, task: dict[str, Any]) -> None:
    teller, pool = Teller(), Pool(task)
    engine = ENGINES[task["engine"]](pool)

    def offer() -> Answer:
        return {"s": 0.0}

    def take() -> Answer:
        start_s = time.perf_counter()
        engine.take()
        return {"s": time.perf_counter() - start_s, "missing": 0}

    if role == "send":
        teller.tell(checksum=pool.fill(), there=engine.listen())
    else:
        engine.connect(**task["there"])
        teller.tell(checksum=0)
    serve(teller, {"offer": offer, "take": take, "clear": pool.clear, "checksum": pool.checksum, "discard": dict})
    os._exit(0)  # the engines' threads do not always end


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
