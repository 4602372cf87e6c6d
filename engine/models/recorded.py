"""The layers' loops of a step of decodes, or of prompts, recorded once and then run as one for any size, on a CPU.

Called one by one from Python, the hundreds of small loops of a step take milliseconds more than what they do; and
recording them takes longer than some steps. So a recording has room for more tokens than the step it was made for, and
is told how many there are.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.kernels.arrays import array_of
from kvasir.kernels.backend import is_triton

if TYPE_CHECKING:
    from kvasir.kernels.cpu.recording import Buffers, Recording

# Shapes: T tokens in this step  R tokens that there is room for  C hidden size
#   M blocks of the longest sequence  W as many, rounded up

log = logging.getLogger(__name__)

_LEAST_ROOM, _MOST_SEQUENCES, _MOST_TOKENS = 8, 64, 512  # larger steps take longer than calling their loops
_MOST_RECORDINGS = 48  # of different widths W: a model of 2 ** 20 tokens has 17, for decodes and for prompts

Layers = Callable[[Tensor, Tensor, BatchInputs, Tensor], Tensor]  # hidden, residual, batch, kv_cache -> hidden


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The memory that the recording reads and writes, and the recording."""

    nothing: Tensor  # [R, C], what is to be added to residual at first
    residual: Tensor  # [R, C]
    inputs: list[NDArray[Any]]  # `_inputs` of residual and of a batch with room
    out: Tensor  # [R, C], what is to be added to residual at last
    recording: "Recording"

    def fill(self, residual: Tensor, batch: BatchInputs) -> None:
        for mine, given in zip(self.inputs, _inputs(residual, batch), strict=True):
            mine[tuple(map(slice, given.shape))] = given  # what lies behind the blocks of a sequence is never looked at
        starts = self.inputs[-1]
        starts[len(batch.query_starts) :] = starts[len(batch.query_starts) - 1]  # no tokens in further sequences


class RecordedLayers:
    """residual [T, C], the embedded tokens -> what comes out behind `layers`: their residual and their hidden, added"""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._recordings: OrderedDict[tuple[Any, ...], _Recorded] = OrderedDict()
        self._buffers: Buffers | None = None
        self._is_recordable = True
        self.num_recorded = 0  # so far

    def __call__(self, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """residual may be changed"""
        recorded = self._recorded(residual, batch, kv_cache) if _is_small_on_cpu(residual, batch) else None
        if recorded is None:
            hidden = self._layers(torch.zeros_like(residual), residual, batch, kv_cache)
            return residual.add_(hidden)
        num_tokens = len(residual)
        recorded.fill(residual, batch)
        recorded.recording.run(num_tokens)
        return recorded.residual[:num_tokens] + recorded.out[:num_tokens]

    def _recorded(self, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> _Recorded | None:
        """One that has room for the batch; made where there is none."""
        width = _power_of_two(batch.block_tables.shape[1])
        key = (kv_cache.data_ptr(), kv_cache.dtype, *kv_cache.shape, width, batch.num_decodes > 0)
        recorded = self._recordings.get(key)
        if recorded is None or len(recorded.residual) < len(residual):
            self._recordings.pop(key, None)
            recorded = self._record(residual, batch, kv_cache, width) if self._is_recordable else None
            if recorded is None:
                return None
            self._recordings[key] = recorded
            if len(self._recordings) > _MOST_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return recorded

    def _record(self, residual: Tensor, batch: BatchInputs, kv_cache: Tensor, width: int) -> _Recorded | None:
        from kvasir.kernels.cpu.recording import Buffers, NotRecordable, Recording, record

        if self._buffers is None:
            self._buffers = Buffers()
        room = max(_power_of_two(len(residual)), _LEAST_ROOM)
        nothing, own_residual = residual.new_zeros(2, room, residual.shape[1])
        own_batch = _with_room(batch, room, width)
        traces = []
        try:
            for num_rows in (room - 1, room):
                out = None  # its place is free for the next
                few = _first(own_batch, num_rows)
                with record(self._buffers, num_rows, room) as steps:
                    out = self._layers(nothing[:num_rows], own_residual[:num_rows], few, kv_cache)
                traces.append(steps)
            recording = Recording(traces[1], with_one_less=traces[0])
        except NotRecordable as reason:
            log.info("steps run loop by loop: %s", reason)
            self._is_recordable = False
            return None
        assert out is not None
        self.num_recorded += 1
        return _Recorded(nothing, own_residual, _inputs(own_residual, own_batch), out, recording)


def _is_small_on_cpu(residual: Tensor, batch: BatchInputs) -> bool:
    """Decodes of one token each, or prompts; not both."""
    num_tokens, num_sequences = len(residual), len(batch.seq_lens)
    is_of_a_kind = batch.num_decodes == num_tokens or batch.num_decodes == 0
    is_small = num_sequences <= _MOST_SEQUENCES and num_tokens <= _MOST_TOKENS
    return is_of_a_kind and is_small and residual.device.type == "cpu" and not is_triton(residual)


def _power_of_two(number: int) -> int:
    """The next one, so that a step seldom needs a recording of its own."""
    return 1 << max(number - 1, 0).bit_length()


def _with_room(batch: BatchInputs, room: int, width: int) -> BatchInputs:
    """Memory for what the layers read of a batch of `room` tokens."""
    num_sequences = room if batch.num_decodes else _MOST_SEQUENCES
    return replace(
        batch,
        ropes=tuple((cos.new_zeros(room, cos.shape[1]), sin.new_zeros(room, sin.shape[1])) for cos, sin in batch.ropes),
        slot_mapping=batch.slot_mapping.new_zeros(room),
        block_tables=batch.block_tables.new_zeros(num_sequences, width),
        seq_lens=batch.seq_lens.new_zeros(num_sequences),
        query_starts=batch.query_starts.new_zeros(num_sequences + 1),
    )


def _first(batch: BatchInputs, num_tokens: int) -> BatchInputs:
    """Views of the first ones; of prompts, of all sequences."""
    num_sequences = num_tokens if batch.num_decodes else _MOST_SEQUENCES
    return replace(
        batch,
        num_decodes=num_tokens if batch.num_decodes else 0,
        ropes=tuple((cos[:num_tokens], sin[:num_tokens]) for cos, sin in batch.ropes),
        slot_mapping=batch.slot_mapping[:num_tokens],
        block_tables=batch.block_tables[:num_sequences],
        seq_lens=batch.seq_lens[:num_sequences],
    )


def _inputs(residual: Tensor, batch: BatchInputs) -> list[NDArray[Any]]:
    """What the layers read, as arrays in the same memory: torch takes several times as long to copy so little."""
    ropes = [part for rope in batch.ropes for part in rope]
    tensors = (residual, *ropes, batch.slot_mapping, batch.block_tables, batch.seq_lens, batch.query_starts)
    return [array_of(each) for each in tensors]
