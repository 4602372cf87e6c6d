"""Files and sockets by their descriptors: closed in time, read and written to the end. All calls block, and raise
OSError."""

import os


class Descriptor:
    """A descriptor until the end of a `with`. Not made of a generator, which takes as long as opening a file."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def write_all(file: int, parts: list[memoryview]) -> None:
    """Empties the list."""
    while parts:
        num_written = os.writev(file, parts)
        while parts and num_written >= parts[0].nbytes:
            num_written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][num_written:]


def read_all(file: int, into: memoryview) -> int:
    """How many bytes there were; no more than find room."""
    num_read = 0
    while num_read < into.nbytes and (num_more := os.readv(file, [into[num_read:]])):
        num_read += num_more
    return num_read
