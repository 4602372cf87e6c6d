"""What nodes say in their sessions: one event each, addressed to one request."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvasir.common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NodeUnavailable,
    NumericalError,
    Overloaded,
    ServingError,
)
from kvasir.common.tokens import unpack_tokens
from kvasir.proto import common_pb2
from kvasir.router.prefix_index import KVEvents
from kvasir.router.types import PositionLogprobs


class Tokens(NamedTuple):
    """`finish_reason` is "stop", "length", "handed_off" (prefill node: a decode node goes on) or None."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[PositionLogprobs, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """The ticket's first `num_blocks` blocks can be fetched; committed: these are all."""

    num_blocks: int
    committed: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    num_cached_tokens: int
    num_fetched_tokens: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """The receiver has what it will get: the ticket's blocks are of no more use."""

    num_blocks_fetched: int
    transfer_s: float
    overlapped_s: float = 0.0  # the part of it before the sender had published its last block
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next positions of the prompt; the first is its second token's."""

    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    error: ServingError


Event = Tokens | Progress | Admitted | Transferred | PromptLogprobs | Failed

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_HANDED_OFF: "handed_off",
}

_ERRORS: dict[int, type[InvalidRequest | Overloaded | DeadlineExceeded | NumericalError]] = {
    common_pb2.FAILURE_CODE_INVALID_REQUEST: InvalidRequest,
    common_pb2.FAILURE_CODE_OVERLOADED: Overloaded,
    common_pb2.FAILURE_CODE_DRAINING: Draining,
    common_pb2.FAILURE_CODE_DEADLINE_EXCEEDED: DeadlineExceeded,
    common_pb2.FAILURE_CODE_NUMERICAL: NumericalError,
}


def events_from_steps(steps: Sequence[common_pb2.StepOutput]) -> Iterator[tuple[int, Event]]:
    """As `events_from_step`, with the tokens of a sequence together."""
    return events_from_step(steps[0]) if len(steps) == 1 else _together(steps)


def _together(steps: Sequence[common_pb2.StepOutput]) -> Iterator[tuple[int, Event]]:
    tokens: dict[tuple[int, int], list[Tokens]] = {}
    for step in steps:
        for handle, event in events_from_step(step):
            if isinstance(event, Tokens):
                tokens.setdefault((handle, event.sequence), []).append(event)
            else:
                yield handle, event
    for (handle, _), parts in tokens.items():
        yield handle, parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    token_ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    logprobs = tuple(chain.from_iterable(part.logprobs for part in parts))
    return Tokens(token_ids, parts[-1].finish_reason, logprobs, parts[0].sequence)


def events_from_step(step: common_pb2.StepOutput) -> Iterator[tuple[int, Event]]:
    """(handle, event) in the order in which a request's life has them."""
    for admitted in step.admitted:
        yield admitted.handle, Admitted(admitted.num_cached_tokens, admitted.num_fetched_tokens)
    for transfer in step.transfers:
        yield (
            transfer.handle,
            Transferred(transfer.num_blocks_fetched, transfer.transfer_s, transfer.overlapped_s, transfer.num_bytes),
        )
    for prompt in step.prompt_logprobs:
        yield prompt.handle, PromptLogprobs(_logprobs(prompt.positions))
    for progress in step.progress:
        yield progress.handle, Progress(progress.num_blocks, progress.committed)
    for output in step.outputs:
        tokens = Tokens(
            unpack_tokens(output.token_ids),
            _FINISH_REASONS[output.finish_reason],
            _logprobs(output.logprobs) if output.logprobs else (),
            output.sequence,
        )
        yield output.handle, tokens


def kv_events_from_proto(message: common_pb2.KVEvents) -> KVEvents:
    return KVEvents(message.first_sequence, message.stored_keys, message.dropped_keys, message.snapshot)


def error_from_failure(failure: common_pb2.RequestFailed, address: str) -> ServingError:
    """What the code says can be done about it; the message as the node wrote it."""
    kind = _ERRORS.get(failure.code)
    return NodeUnavailable(f"{address}: {failure.message}") if kind is None else kind(failure.message)


def _logprobs(positions: Iterable[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(tuple((entry.token_id, entry.logprob) for entry in position.entries), position.rank)
        for position in positions
    )
