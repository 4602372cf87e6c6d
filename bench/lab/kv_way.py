"""What every other way to move blocks than ours is made of, and how its two processes run.

Needs the standard library alone: some are run by interpreters that have nothing of ours.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvasir.bench.lab.kv_pipe import Answer, Teller, checksum, serve, touched_memory


class Pool:
    """Blocks side by side, in memory that is there."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.num_blocks: int = task["num_blocks"]
        self.block_bytes: int = task["block_bytes"]
        self.memory = memoryview(touched_memory(self.num_blocks * self.block_bytes))

    def block(self, index: int) -> memoryview:
        return self.memory[index * self.block_bytes : (index + 1) * self.block_bytes]

    def clear(self) -> Answer:
        self.memory[:] = bytes(self.memory.nbytes)
        return {}

    def checksum(self) -> Answer:
        return {"checksum": checksum(self.memory)}

    def fill(self) -> int:
        self.memory[:] = os.urandom(self.memory.nbytes)
        return checksum(self.memory)


class Way:
    """One way to move a pool: all that is done before `take` is called is `offer`."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        self.pool = pool

    def listen(self) -> str:
        """The sender gets ready, and says where."""
        return ""

    def connect(self, address: str) -> None: ...
    def offer(self) -> None: ...
    def take(self) -> None: ...
    def discard(self) -> None: ...


def run_way(ways: Mapping[str, type[Way]], role: str, task: dict[str, Any]) -> None:
    """One of the two processes, until its owner ends it. role: send, or receive."""
    teller, pool = Teller(), Pool(task)
    way = ways[task["way"]](task, pool)

    def timed(what: Callable[[], None]) -> Answer:
        start_s = time.perf_counter()
        what()
        return {"s": time.perf_counter() - start_s}

    def discard() -> Answer:
        way.discard()
        return {}

    if role == "send":
        teller.tell(checksum=pool.fill(), address=way.listen())
    else:
        way.connect(task["address"])
        teller.tell(checksum=0)
    verbs: dict[str, Callable[..., Answer]] = {
        "offer": lambda: timed(way.offer),
        "take": lambda: {**timed(way.take), "missing": 0},
        "clear": pool.clear,
        "checksum": pool.checksum,
        "discard": discard,
    }
    serve(teller, verbs)
