"""Plain ways through files. Every block of a store is a new one, and so is a file, but for what is said to be kept."""

import mmap
import os
from pathlib import Path
from typing import Any

from kvasir.bench.lab.kv_pipe import checksum
from kvasir.bench.lab.kv_way import Pool, Way

_MODE = 0o600


class NewMappedFile(Way):
    """Made as large as all blocks, mapped, copied into; then mapped by the other, and copied out of."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        self._start = str(Path(task["path"]) / f"plain-{type(self).__name__}-{pool.num_blocks}")
        self._round = 0  # of this side

    def _next(self) -> Path:
        self._round += 1
        return Path(f"{self._start}-{self._round}")

    def offer(self) -> None:
        file = os.open(self._next(), os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
        os.ftruncate(file, self.pool.memory.nbytes)
        with mmap.mmap(file, self.pool.memory.nbytes) as mapped:
            mapped[:] = self.pool.memory
        os.close(file)

    def take(self) -> None:
        file = os.open(self._next(), os.O_RDONLY)
        with mmap.mmap(file, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            self.pool.memory[:] = view
        os.close(file)


class Files(NewMappedFile):
    """One for each block, written and read: nothing mapped, and nothing made whole first and renamed."""

    def offer(self) -> None:
        folder = self._next()
        folder.mkdir()
        for index in range(self.pool.num_blocks):
            file = os.open(folder / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
            num_written = os.write(file, self.pool.block(index))
            assert num_written == self.pool.block_bytes
            os.close(file)

    def take(self) -> None:
        folder = self._next()
        for index in range(self.pool.num_blocks):
            file = os.open(folder / str(index), os.O_RDONLY)
            num_read = os.readv(file, [self.pool.block(index)])
            assert num_read == self.pool.block_bytes
            os.close(file)


class KeptMappedFile(Way):
    """One file that both have mapped for good, with every page in memory: no store of blocks, but all that a file can
    do."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        self._path = Path(task["path"]) / "kept"
        self._mapped: mmap.mmap | None = None

    def listen(self) -> str:
        self._path.write_bytes(bytes(self.pool.memory.nbytes))
        self.connect("")
        return ""

    def connect(self, address: str) -> None:
        with self._path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        checksum(memoryview(self._mapped))  # every page is there

    def offer(self) -> None:
        assert self._mapped is not None, "mapped when ready"
        memoryview(self._mapped)[:] = self.pool.memory

    def take(self) -> None:
        assert self._mapped is not None, "mapped when ready"
        self.pool.memory[:] = memoryview(self._mapped)
