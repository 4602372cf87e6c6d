"""What every plain way to move blocks is made of."""

import os
import time
from collections.abc import Callable
from typing import Any

from kvasir.bench.lab.kv_pipe import Answer, checksum, touched_memory


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


def timed(what: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    what()
    return time.perf_counter() - start_s


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
