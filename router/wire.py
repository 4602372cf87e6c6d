"""Proto messages to the router's own values and back. No other file of the dispatching half builds a message."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvasir.common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NodeUnavailable,
    NumericalError,
    Overloaded,
    ServingError,
)
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import common_pb2, decode_pb2, prefill_pb2
from kvasir.router.nodes import NodeInfo, NodeLoad, Role
from kvasir.router.types import Grammar, PositionLogprobs, RoutedRequest, Sampling

Command = prefill_pb2.PrefillCommand | decode_pb2.DecodeCommand
_COMMANDS: dict[Role, Callable[..., Command]] = {
    Role.PREFILL: prefill_pb2.PrefillCommand,
    Role.DECODE: decode_pb2.DecodeCommand,
}

# --- what nodes say: one event each, addressed to one request ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
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
    num_tokens_recomputed: int
    transfer_s: float
    overlapped_s: float = 0.0  # the part of it before the sender had published its last block
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    first_position: int
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


def events_from_steps(steps: Sequence[common_pb2.StepOutput]) -> Iterator[tuple[int, Event]]:
    """As `events_from_step`, with the tokens of a sequence together."""
    if len(steps) == 1:
        yield from events_from_step(steps[0])
        return
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
            Transferred(
                transfer.num_blocks_fetched,
                transfer.num_tokens_recomputed,
                transfer.transfer_s,
                transfer.overlapped_s,
                transfer.num_bytes,
            ),
        )
    for prompt in step.prompt_logprobs:
        yield prompt.handle, PromptLogprobs(prompt.first_position, _logprobs(prompt.positions))
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


def error_from_failure(failure: common_pb2.RequestFailed, address: str) -> ServingError:
    """What the code says can be done about it; the message as the node wrote it."""
    message = failure.message
    if failure.code == common_pb2.FAILURE_CODE_INVALID_REQUEST:
        return InvalidRequest(message)
    if failure.code == common_pb2.FAILURE_CODE_OVERLOADED:
        return Overloaded(message)
    if failure.code == common_pb2.FAILURE_CODE_DRAINING:
        return Draining(message)
    if failure.code == common_pb2.FAILURE_CODE_DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    if failure.code == common_pb2.FAILURE_CODE_NUMERICAL:
        return NumericalError(message)
    return NodeUnavailable(f"{address}: {message}")


def node_from_proto(address: str, message: common_pb2.NodeDescription) -> NodeInfo:
    return NodeInfo(
        address=address,
        role=Role.PREFILL if message.role == common_pb2.ROLE_PREFILL else Role.DECODE,
        epoch=message.node_epoch,
        model_name=message.model_name,
        kv_identity=message.kv_identity,
        block_size=message.block_size,
        num_kv_heads=message.num_kv_heads,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        num_total_blocks=message.num_total_blocks,
        connector=message.connector,
        kv_endpoint=message.kv_endpoint,
        metrics_address=message.metrics_address,
        eos_token_ids=frozenset(unpack_tokens(message.eos_token_ids)),
        kv_stored_as=message.kv_stored_as,
    )


def load_from_proto(message: common_pb2.NodeLoad) -> NodeLoad:
    return NodeLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_blocks=message.num_free_blocks,
        num_queued_tokens=message.num_queued_tokens,
        num_leased_blocks=message.num_leased_blocks,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_step_s=message.decode_step_s,
    )


# --- what the router says --------------------------------------------------------------------------------------


def start_prefill(handle: int, request: common_pb2.GenerationRequest, ticket: common_pb2.Ticket) -> Command:
    start = prefill_pb2.StartPrefill(handle=handle, request=request, ticket=ticket)
    return prefill_pb2.PrefillCommand(start=start)


def release_ticket(handle: int) -> Command:
    return prefill_pb2.PrefillCommand(release=prefill_pb2.ReleaseTicket(handle=handle))


def start_decode(handle: int, request: common_pb2.GenerationRequest, ticket: common_pb2.Ticket | None) -> Command:
    """With a ticket, what is to be said of the prompt is said by the sender."""
    if ticket is not None and request.sampling.HasField("prompt_logprobs"):
        whole, request = request, common_pb2.GenerationRequest()
        request.CopyFrom(whole)
        request.sampling.ClearField("prompt_logprobs")
    start = decode_pb2.StartDecode(handle=handle, request=request, ticket=ticket)
    return decode_pb2.DecodeCommand(start=start)


def continue_decode(handle: int, token_ids: Sequence[Sequence[int]]) -> Command:
    """The first tokens of each sequence. A sequence without any: none will come, sample it there."""
    first = [decode_pb2.FirstTokens(sequence=i, token_ids=pack_tokens(ids)) for i, ids in enumerate(token_ids)]
    return decode_pb2.DecodeCommand(continue_decode=decode_pb2.ContinueDecode(handle=handle, first=first))


def report_progress(handle: int, progress: Progress) -> Command:
    message = common_pb2.TicketProgress(handle=handle, num_blocks=progress.num_blocks, committed=progress.committed)
    return decode_pb2.DecodeCommand(progress=decode_pb2.ReportProgress(progress=message))


def abort_transfer(handle: int, reason: str) -> Command:
    return decode_pb2.DecodeCommand(abort_transfer=decode_pb2.AbortTransfer(handle=handle, reason=reason))


def cancel(role: Role, handle: int, sequence: int | None = None) -> Command:
    """One sequence, or all."""
    return _COMMANDS[role](cancel=common_pb2.CancelRequest(handle=handle, sequence=sequence))


def open_session(role: Role, session_id: str, last_event: int) -> Command:
    return _COMMANDS[role](open=common_pb2.OpenSession(session_id=session_id, last_event=last_event))


def acknowledge(role: Role, last_event: int) -> Command:
    return _COMMANDS[role](acknowledge=common_pb2.Acknowledge(last_event=last_event))


def ticket_to(sender: NodeInfo, transfer_id: str) -> common_pb2.Ticket:
    """Where a receiver finds the blocks that `sender` will publish; a store has no endpoint."""
    endpoint = common_pb2.Endpoint(address=sender.kv_endpoint, first_kv_head=0, num_kv_heads=sender.num_kv_heads)
    endpoints = [endpoint] if sender.kv_endpoint else []
    return common_pb2.Ticket(
        transfer_id=transfer_id, connector=sender.connector, endpoints=endpoints, stored_as=sender.kv_stored_as
    )


def request_to_proto(
    request: RoutedRequest, output_token_ids: Sequence[int], deadline_s: float | None
) -> common_pb2.GenerationRequest:
    """Complete: with the output ids so far any node can begin or continue it. Several sequences have none yet."""
    return common_pb2.GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=pack_tokens(request.prompt_token_ids),
        output_token_ids=[pack_tokens(output_token_ids)] if output_token_ids else [],
        sampling=sampling_to_proto(request.sampling),
        num_sequences=request.num_sequences,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline_s=deadline_s,
    )


def sampling_to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=pack_tokens(sorted(sampling.stop_token_ids)),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        allowed_token_ids=pack_tokens(sampling.allowed_token_ids),
        bad_words=[pack_tokens(word) for word in sampling.bad_words],
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
    )


def grammar_to_proto(grammar: Grammar) -> common_pb2.Grammar:
    match grammar.kind:
        case "json_schema":
            return common_pb2.Grammar(json_schema=grammar.source)
        case "regex":
            return common_pb2.Grammar(regex=grammar.source)
        case "lark":
            return common_pb2.Grammar(lark=grammar.source)


def _logprobs(positions: Iterable[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(tuple((entry.token_id, entry.logprob) for entry in position.entries), position.rank)
        for position in positions
    )
