"""Files and sockets by their descriptors: closed reliably, read and written completely. All calls block, and raise
OSError."""

import os


class Descriptor:
    """Closes a descriptor at the end of a `with`. No `contextmanager`, which would cost as much as opening a file."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def write_all(file: int, parts: list[memoryview]) -> None:
    """Write all parts, in order. Empties the list."""
    while parts:
        num_written = os.writev(file, parts)
        while parts and num_written >= parts[0].nbytes:
            num_written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][num_written:]


def read_all(file: int, into: memoryview) -> int:
    """Read to the end of the file, or until `into` is full. Returns the number of bytes."""
    num_read = 0
    while num_read < into.nbytes and (num_more := os.readv(file, [into[num_read:]])):
        num_read += num_more
    return num_read
