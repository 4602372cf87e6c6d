"""The only file here that knows proto: messages to the engine's values and back."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from kvasir.common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NumericalError,
    Overloaded,
    ServingError,
)
from kvasir.common.grammar import Grammar
from kvasir.common.hashing import BlockHash, routing_key
from kvasir.common.seeds import sequence_seed
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.engine.addresses import SequenceAddress, address_of, request_id_of
from kvasir.engine.request import FinishReason, Request
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.stats import EngineStats
from kvasir.engine.step import Admitted, PositionLogprobs, PromptLogprobs, SequenceOutput
from kvasir.proto import common_pb2

MAX_SEQUENCES = 128  # of one request

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.HANDED_OFF: common_pb2.FINISH_REASON_HANDED_OFF,
}
_FAILURE_CODES = {
    InvalidRequest: common_pb2.FAILURE_CODE_INVALID_REQUEST,
    Overloaded: common_pb2.FAILURE_CODE_OVERLOADED,
    Draining: common_pb2.FAILURE_CODE_DRAINING,
    DeadlineExceeded: common_pb2.FAILURE_CODE_DEADLINE_EXCEEDED,
    NumericalError: common_pb2.FAILURE_CODE_NUMERICAL,
    ServingError: common_pb2.FAILURE_CODE_INTERNAL,
    Exception: common_pb2.FAILURE_CODE_INTERNAL,
}

# --- what comes in ---------------------------------------------------------------------------------------------


def sampling_from_proto(message: common_pb2.SamplingParams, sequence: int = 0) -> SamplingParams:
    """A field that is absent switches its rule off, so a top_p or repetition_penalty of 0 reads as 1."""
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=max(message.top_k, 0),
            min_p=message.min_p,
            seed=sequence_seed(message.seed, sequence),
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
            min_tokens=message.min_tokens,
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(unpack_tokens(message.stop_token_ids)),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            allowed_token_ids=unpack_tokens(message.allowed_token_ids),
            bad_words=tuple(unpack_tokens(word) for word in message.bad_words),
            grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def grammar_from_proto(message: common_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("source")
    if kind is None:
        raise InvalidRequest("a grammar without a source")
    return Grammar(kind, getattr(message, kind))


def request_from_proto(
    address: SequenceAddress,
    message: common_pb2.GenerationRequest,
    *,
    vocab_size: int,
    arrival_s: float,
    hand_off: bool = False,
    awaits: Collection[str] = (),
) -> Request:
    """One sequence of the request. Raises InvalidRequest for what a router should never have sent."""
    sampling = sampling_from_proto(message.sampling, address.sequence)
    try:
        prompt = unpack_tokens(message.prompt_token_ids)
        has_outputs = address.sequence < len(message.output_token_ids)
        outputs = unpack_tokens(message.output_token_ids[address.sequence]) if has_outputs else ()
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    _check_token_ids((*prompt, *outputs), vocab_size, "prompt")
    _check_sampling(sampling, vocab_size)
    return Request(
        request_id=request_id_of(address),
        prompt_token_ids=list(prompt),
        sampling=sampling,
        output_token_ids=list(outputs),
        cache_salt=message.cache_salt,
        priority=message.priority,
        arrival_s=arrival_s,
        hand_off=hand_off,
        awaits=set(awaits),
    )


def requests_from_proto(
    session_id: str, handle: int, message: common_pb2.GenerationRequest, *, awaits: Collection[str] = (), **options: Any
) -> tuple[Request, ...]:
    """All sequences, the first of which leads the others. Options as for `request_from_proto`.

    Sequences that have outputs of their own have more than the prompt to compute: they are asked for one by one.
    """
    num_sequences = max(message.num_sequences, 1)
    if num_sequences > MAX_SEQUENCES:
        raise InvalidRequest(f"at most {MAX_SEQUENCES} sequences a request, got {num_sequences}", "n")
    if num_sequences > 1 and any(message.output_token_ids):
        raise InvalidRequest("sequences that have begun are asked for one by one", "n")
    leader = request_from_proto(SequenceAddress(session_id, handle, 0), message, awaits=awaits, **options)
    for sequence in range(1, num_sequences):
        sampling = replace(leader.sampling, seed=sequence_seed(message.sampling.seed, sequence), prompt_logprobs=None)
        fork = Request(
            request_id=request_id_of(SequenceAddress(session_id, handle, sequence)),
            prompt_token_ids=leader.prompt_token_ids,  # never changed
            sampling=sampling,
            cache_salt=leader.cache_salt,
            priority=leader.priority,
            arrival_s=leader.arrival_s,
            hand_off=leader.hand_off,
            awaits=set(awaits) - {"blocks"},
        )
        leader.forks.append(fork)
    return leader, *leader.forks


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    _check_token_ids(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    _check_token_ids([token_id for token_id, _ in sampling.logit_bias], vocab_size, "logit_bias")
    _check_token_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_token_ids([token_id for word in sampling.bad_words for token_id in word], vocab_size, "bad_words")
    if not all(sampling.bad_words):
        raise InvalidRequest("bad_words holds an empty word", "bad_words")


def _check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} is outside of the vocabulary of {vocab_size}", param)


# --- what goes out ---------------------------------------------------------------------------------------------


def output_to_proto(output: SequenceOutput) -> common_pb2.SequenceOutput:
    address = address_of(output.request_id)
    return common_pb2.SequenceOutput(
        handle=address.handle,
        sequence=address.sequence,
        token_ids=pack_tokens(output.token_ids),
        finish_reason=_FINISH_REASONS[output.finish_reason],
        logprobs=[logprobs_to_proto(position) for position in output.logprobs],
    )


def logprobs_to_proto(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        entries=[common_pb2.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in position.entries],
        rank=position.rank,
    )


def prompt_logprobs_to_proto(scored: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(
        handle=address_of(scored.request_id).handle,
        first_position=scored.first_position,
        positions=[logprobs_to_proto(position) for position in scored.positions],
    )


def admitted_to_proto(admitted: Admitted, num_fetched_tokens: int = 0) -> common_pb2.RequestAdmitted:
    return common_pb2.RequestAdmitted(
        handle=address_of(admitted.request.request_id).handle,
        num_cached_tokens=admitted.num_cached_tokens,
        num_fetched_tokens=num_fetched_tokens,
        queue_s=admitted.queue_s,
    )


def failure_to_proto(handle: int, error: Exception) -> common_pb2.RequestFailed:
    """The nearest class that has a code decides; what nobody foresaw is internal."""
    code = next(_FAILURE_CODES[cls] for cls in type(error).__mro__ if cls in _FAILURE_CODES)
    return common_pb2.RequestFailed(handle=handle, code=code, message=str(error) or type(error).__name__)


def kv_events_to_proto(
    sequence: int, stored: Sequence[BlockHash], dropped: Sequence[BlockHash] = (), snapshot: bool = False
) -> common_pb2.KVEvents:
    return common_pb2.KVEvents(
        first_sequence=sequence,
        snapshot=snapshot,
        stored_keys=map(routing_key, stored),
        dropped_keys=map(routing_key, dropped),
    )


def load_to_proto(stats: EngineStats, num_leased_blocks: int = 0, block_fetch_s: float = 0.0) -> common_pb2.NodeLoad:
    speed = stats.prefill_speed
    return common_pb2.NodeLoad(
        num_running=stats.num_running + stats.num_loading,
        num_waiting=stats.num_waiting,
        num_free_blocks=stats.num_free_blocks,
        num_total_blocks=stats.num_total_blocks,
        num_queued_tokens=stats.num_queued_tokens,
        num_leased_blocks=num_leased_blocks,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        prefill_token_s=speed.token_s if speed else 0.0,
        prefill_position_s=speed.position_s if speed else 0.0,
        block_fetch_s=block_fetch_s,
    )
