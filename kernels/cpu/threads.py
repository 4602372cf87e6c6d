"""Runs a compiled loop on all compute threads: on the very threads that torch computes on.

torch and numba each bring an OpenMP of their own, and two pools of threads on the same cores get in each other's way
(idle OpenMP threads spin for a while). So the loops are compiled to plain C functions and started by the
`GOMP_parallel` of the OpenMP that torch loaded. Without one, a loop runs on the calling thread.

A loop takes its next piece of work from a counter in its arguments, so a thread that the machine has put aside delays
nothing but what it holds: its piece, and of products the next one, which it fetches meanwhile.
"""

import ctypes
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from kvasir.kernels.cpu.compiling import Loop

_Address = ctypes.c_void_p


def float_bits(value: float) -> int:
    """A float32 as an argument; the loop takes it back by `float32_of`."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def scales(scale: float, softcap: float) -> tuple[int, int]:
    """Of attention, as arguments: what queries are multiplied by, and what tanh of a score is; 0: no tanh.

    The loops take powers of 2, not of e.
    """
    base = math.log2(math.e)
    return (float_bits(scale / softcap), float_bits(softcap * base)) if softcap > 0 else (float_bits(scale * base), 0)


def launch(loop: Loop, num_pieces: int, *arguments: int) -> None:
    """Call the compiled `loop` once on each compute thread with [counter = 0, *arguments], 64 bits each.

    A single piece of work is done right here. For two it is all threads or none: OpenMP ends the threads that a
    smaller team leaves over, and would start them anew for the next matrix product.
    """
    if noted := _noted.get():
        noted[0].append((loop, arguments))
        return
    block = (ctypes.c_int64 * (1 + len(arguments)))(0, *arguments)
    num_threads = torch.get_num_threads()
    library = _openmp()
    if num_threads == 1 or num_pieces <= 1 or library is None:
        loop.ctypes(block)
    else:
        library.GOMP_parallel(loop.address, block, num_threads, 0)


Steps = list[tuple[Loop, tuple[int, ...]]]
_noted: ContextVar[tuple[Steps, ...]] = ContextVar("noted", default=())


@contextmanager
def noting(steps: Steps) -> Iterator[None]:
    """What is launched within goes to `steps`, and is not run."""
    token = _noted.set((steps,))
    try:
        yield
    finally:
        _noted.reset(token)


def team_size_address() -> int:
    """Of the C function that says on how many threads a loop is running; 0: always one."""
    library = _openmp()
    if library is None or torch.get_num_threads() == 1:
        return 0
    return ctypes.cast(library.omp_get_num_threads, _Address).value or 0


@cache
def _openmp() -> ctypes.CDLL | None:
    # RTLD_NOLOAD: the library that torch is using, never another copy of it.
    packages = Path(torch.__file__).parents[1]
    for path in (*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")):
        library = ctypes.CDLL(str(path), mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
        library.GOMP_parallel.argtypes = [_Address, _Address, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        return library
    return None
