"""A sequence of loops, recorded once and run again and again: by one start of the threads, with barriers in between.

Starting each of hundreds of small loops from Python costs more than many of them take. A recording keeps their
arguments, so whatever is behind an address must still be there when it runs, and have the same shape.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kvasir.kernels.cpu import sequence, threads

_LINE_BYTES = 64  # of a cache line
_WORDS_OF_A_LINE = 8
_ALLOCATIONS = frozenset({"aten::new_empty", "aten::empty", "aten::empty_like"})
_VIEWS = frozenset({"aten::slice", "aten::view", "aten::select", "aten::unsqueeze", "aten::detach", "aten::alias"})


class NotRecordable(Exception):
    """Something happened between the loops that a recording would leave out."""


class Buffers:
    """Memory of recorded tensors. What one recording has let go of, a later tensor or another recording gets."""

    def __init__(self) -> None:
        self._blocks: list[tuple[memoryview, Any]] = []

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_elements = int(np.prod(shape))
        size = max(num_elements, 1) * dtype.itemsize
        place = next((i for i, (block, user) in enumerate(self._blocks) if len(block) == size and _is_free(user)), None)
        block = _aligned(size) if place is None else self._blocks[place][0]
        flat = torch.frombuffer(block, dtype=dtype)
        used = block, StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        if place is None:
            self._blocks.append(used)
        else:
            self._blocks[place] = used
        return flat[:num_elements].view(shape)


def _is_free(user: Any) -> bool:
    return bool(user.expired())


def _aligned(size: int) -> memoryview:
    memory = np.zeros(size + _LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + size].data


class Recording:
    """Not for two threads at once. `run` does what the recorded launches would have done.

    with_one_less: the same loops in the same memory, recorded with one row less. The arguments that differ are the
    number of rows, so that `run` can be told another one. NotRecordable: anything else differs.
    """

    def __init__(self, steps: threads.Steps, with_one_less: threads.Steps | None = None) -> None:
        self._loops = [loop for loop, _ in steps]  # they must live as long as their addresses are used
        self._blocks = _argument_blocks(steps)
        self._places = np.empty(0, np.int64)  # in the flat blocks, of the number of rows
        if with_one_less is not None:
            self._places = self._find_rows(with_one_less)
        self._addresses = np.array([loop.address for loop in self._loops], np.int64)
        self._barrier = np.zeros(2 * _WORDS_OF_A_LINE, np.int64)

    def _find_rows(self, with_one_less: threads.Steps) -> Any:
        others = _argument_blocks(with_one_less)
        if [loop for loop, _ in with_one_less] != self._loops or others.shape != self._blocks.shape:
            raise NotRecordable("other loops for another number of rows")
        places = np.flatnonzero(self._blocks != others)
        most = self._blocks.ravel()[places]
        if len(places) and not ((most == most[0]).all() and (others.ravel()[places] == most[0] - 1).all()):
            raise NotRecordable("an argument that depends on the number of rows, and is another number")
        return places

    def run(self, num_rows: int | None = None) -> None:
        if num_rows is not None:
            self._blocks.ravel()[self._places] = num_rows  # a view: the blocks lie in one piece
        threads.launch(
            sequence.run, len(self._addresses), len(self._addresses), self._addresses.ctypes.data,
            self._blocks.ctypes.data, self._blocks.shape[1], self._barrier.ctypes.data,
            threads.team_size_address(), _yield_address(),
        )  # fmt: skip


def _argument_blocks(steps: threads.Steps) -> NDArray[np.int64]:
    """[steps, words]: of each step its counter, then its arguments; whole cache lines."""
    width = max(1 + len(arguments) for _, arguments in steps)
    width = -(-width // _WORDS_OF_A_LINE) * _WORDS_OF_A_LINE
    blocks = np.zeros((len(steps), width), np.int64)
    for block, (_, arguments) in zip(blocks, steps, strict=True):
        block[1 : 1 + len(arguments)] = arguments
    return blocks


@contextmanager
def record(buffers: Buffers, num_rows: int = 0, room: int = 0) -> Iterator[threads.Steps]:
    """Loops launched within are noted, and not run; tensors made within lie in `buffers`.

    Those of `num_rows` rows have room for `room` rows: with less of them, they lie in the same place.
    NotRecordable: anything else was asked of torch, but for views.
    """
    steps: threads.Steps = []
    with threads.noting(steps), _OnlyLoops(buffers, num_rows, room):
        yield steps


class _OnlyLoops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, buffers: Buffers, num_rows: int, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers, self._num_rows, self._room = buffers, num_rows, room

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To skip it, torch would import its compiler first: a second, and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _VIEWS:
            return func(*args, **(kwargs or {}))
        if name not in _ALLOCATIONS:
            raise NotRecordable(name)
        meta = func(*args, **((kwargs or {}) | {"device": "meta"}))
        like = (kwargs or {}).get("device") or (args[0].device if isinstance(args[0], Tensor) else "cpu")
        if torch.device(like).type != "cpu":
            raise NotRecordable(f"{name} on {like}")
        shape = tuple(meta.shape)  # a mode does not watch what it does itself
        if self._room and shape[:1] == (self._num_rows,):
            return self._buffers.tensor((self._room, *shape[1:]), meta.dtype)[: self._num_rows]
        return self._buffers.tensor(shape, meta.dtype)


def _yield_address() -> int:
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    assert address is not None, os.name
    return address
