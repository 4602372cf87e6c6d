"""The layers' loops of a decode step, recorded once for each size of batch and then run as one, on a CPU.

Called one by one from Python, the hundreds of small loops of a step take milliseconds more than what they do.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.kernels.backend import is_triton

if TYPE_CHECKING:
    from kvasir.kernels.cpu.recording import Buffers

# Shapes: T tokens in this step, one a sequence  C hidden size  M blocks of the longest sequence

log = logging.getLogger(__name__)

_MOST_TOKENS = 64
_MOST_RECORDINGS = 64

Layers = Callable[[Tensor, Tensor, BatchInputs, Tensor], Tensor]  # hidden, residual, batch, kv_cache -> hidden


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The memory that the recording reads and writes, and the recording."""

    hidden: Tensor
    residual: Tensor
    batch: BatchInputs
    out: Tensor
    run: Callable[[], None]


class RecordedLayers:
    """As `layers`: hidden [T, C], given and returned, is still to be added to residual [T, C].

    What it returns holds until the next call.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._recordings: OrderedDict[tuple[Any, ...], _Recorded] = OrderedDict()
        self._buffers: Buffers | None = None
        self._is_recordable = True

    def __call__(self, hidden: Tensor, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        if not self._is_recordable or not _is_decode_on_cpu(residual, batch):
            return self._layers(hidden, residual, batch, kv_cache)
        batch = replace(batch, block_tables=_widened(batch.block_tables))
        recorded = self._recorded(residual, batch, kv_cache)
        if recorded is None:
            return self._layers(hidden, residual, batch, kv_cache)
        recorded.hidden.copy_(hidden)
        recorded.residual.copy_(residual)
        _fill(recorded.batch, batch)
        recorded.run()
        residual.copy_(recorded.residual)
        return recorded.out

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def _recorded(self, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> _Recorded | None:
        shapes = tuple(tuple(tensor.shape) for tensor in _tensors(batch))
        key = (kv_cache.data_ptr(), *kv_cache.shape, batch.num_decodes, *shapes)
        if key not in self._recordings:
            recorded = self._record(residual, batch, kv_cache)
            if recorded is None:
                return None
            self._recordings[key] = recorded
            if len(self._recordings) > _MOST_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _record(self, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> _Recorded | None:
        from kvasir.kernels.cpu.recording import Buffers, NotRecordable, Recording, record

        if self._buffers is None:
            self._buffers = Buffers()
        hidden, own_residual = torch.zeros_like(residual), torch.zeros_like(residual)
        own_batch = replace(batch, **{name: _map(torch.clone, value) for name, value in _inputs(batch).items()})
        try:
            with record(self._buffers) as steps:
                out = self._layers(hidden, own_residual, own_batch, kv_cache)
        except NotRecordable as reason:
            log.info("decode steps run loop by loop: the layers call %s", reason)
            self._is_recordable = False
            return None
        return _Recorded(hidden, own_residual, own_batch, out, Recording(steps).run)


def _is_decode_on_cpu(residual: Tensor, batch: BatchInputs) -> bool:
    num_tokens = len(residual)
    is_decode = batch.num_decodes == num_tokens == len(batch.seq_lens)
    return is_decode and num_tokens <= _MOST_TOKENS and residual.device.type == "cpu" and not is_triton(residual)


def _inputs(batch: BatchInputs) -> dict[str, Any]:
    """What holds tensors."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, (Tensor, tuple))}


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return function(value) if isinstance(value, Tensor) else tuple(_map(function, one) for one in value)


def _tensors(batch: BatchInputs) -> list[Tensor]:
    return list(_leaves(tuple(_inputs(batch).values())))


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for one in value:
            yield from _leaves(one)


def _widened(block_tables: Tensor) -> Tensor:
    """To a power of two columns, so that a step seldom has a shape of its own."""
    width = block_tables.shape[1]
    wanted = 1 << max(width - 1, 0).bit_length()
    return torch.nn.functional.pad(block_tables, (0, wanted - width))


def _fill(own: BatchInputs, batch: BatchInputs) -> None:
    for mine, given in zip(_tensors(own), _tensors(batch), strict=True):
        mine.copy_(given)
