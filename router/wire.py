"""The router's own values to proto messages, and what nodes say of themselves back. No other file of the dispatching
half builds a message; what nodes say of requests is in `node_events.py`."""

from collections.abc import Callable, Sequence
from math import inf

from kvasir.common.grammar import Grammar
from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import common_pb2, decode_pb2, prefill_pb2
from kvasir.router.node_events import Progress
from kvasir.router.nodes import NodeInfo, NodeLoad, Role
from kvasir.router.types import RoutedRequest, Sampling

Command = prefill_pb2.PrefillCommand | decode_pb2.DecodeCommand
_COMMANDS: dict[Role, Callable[..., Command]] = {
    Role.PREFILL: prefill_pb2.PrefillCommand,
    Role.DECODE: decode_pb2.DecodeCommand,
}


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
    speed = PrefillSpeed(_measured(message.prefill_token_s), _measured(message.prefill_position_s))
    return NodeLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_blocks=message.num_free_blocks,
        num_queued_tokens=message.num_queued_tokens,
        num_leased_blocks=message.num_leased_blocks,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_step_s=_measured(message.decode_step_s),
        prefill_speed=speed if speed.token_s or speed.position_s else None,
        block_fetch_s=_measured(message.block_fetch_s),
    )


def _measured(seconds: float) -> float:
    """Choices are made by it: what is no time counts as none."""
    return seconds if 0 < seconds < inf else 0.0


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


def request_kv_snapshot(role: Role) -> Command:
    return _COMMANDS[role](snapshot=common_pb2.RequestKVSnapshot())


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
