"""Proto to the engine's values and back."""

from typing import Literal

import pytest

from kvasir.common import errors
from kvasir.common.errors import InvalidRequest, ServingError
from kvasir.common.grammar import Grammar
from kvasir.common.hashing import BlockHash
from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.engine.addresses import SequenceAddress, address_of, request_id_of
from kvasir.engine.request import FinishReason, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.stats import EngineStats
from kvasir.engine.step import Admitted, PositionLogprobs, SequenceOutput
from kvasir.engine.wire import (
    admitted_to_proto,
    failure_to_proto,
    kv_events_to_proto,
    load_to_proto,
    output_to_proto,
    request_from_proto,
    sampling_from_proto,
)
from kvasir.proto import common_pb2

ADDRESS = SequenceAddress("router/1", 7, 0)


def generation(**fields: object) -> common_pb2.GenerationRequest:
    defaults = {"prompt_token_ids": pack_tokens([1, 2, 99]), "sampling": common_pb2.SamplingParams(max_tokens=4)}
    return common_pb2.GenerationRequest(**{**defaults, **fields})


def test_a_request_id_names_session_handle_and_sequence() -> None:
    assert request_id_of(ADDRESS) == "router/1/7/0"
    assert address_of(RequestId("router/1/7/0")) == ADDRESS


def test_a_request_comes_whole() -> None:
    message = generation(output_token_ids=[pack_tokens([3]), pack_tokens([4, 5])], cache_salt="tenant", priority=-2)
    request = request_from_proto(
        SequenceAddress("s", 7, 1), message, vocab_size=100, arrival_s=12.5, hand_off=True, awaits={"blocks"}
    )
    assert request.request_id == "s/7/1"
    assert request.prompt_token_ids == [1, 2, 99]
    assert request.output_token_ids == [4, 5]
    assert (request.cache_salt, request.priority, request.arrival_s) == ("tenant", -2, 12.5)
    assert request.hand_off
    assert request.awaits == {"blocks"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": pack_tokens([1, 100])},
        {"prompt_token_ids": b"abc"},
        {"output_token_ids": [pack_tokens([100])]},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=-1)},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=float("nan"))},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, top_p=1.5)},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, stop_token_ids=b"abc")},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, allowed_token_ids=pack_tokens([100]))},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, logit_bias=[common_pb2.LogitBias(token_id=100, bias=1)])},
        {"sampling": common_pb2.SamplingParams(max_tokens=1, grammar=common_pb2.Grammar())},
    ],
)
def test_what_a_router_should_not_have_sent_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        request_from_proto(ADDRESS, generation(**fields), vocab_size=100, arrival_s=0)


def test_absent_sampling_fields_are_off() -> None:
    assert sampling_from_proto(common_pb2.SamplingParams(max_tokens=3)) == SamplingParams(max_tokens=3)
    assert sampling_from_proto(common_pb2.SamplingParams(max_tokens=3, top_k=-1)).top_k == 0


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_a_grammar_comes_as_its_source(kind: Literal["json_schema", "regex", "lark"]) -> None:
    message = common_pb2.SamplingParams(max_tokens=3, grammar=common_pb2.Grammar(**{kind: "ü"}))
    assert sampling_from_proto(message).grammar == Grammar(kind, "ü")


def test_sampling_comes_whole() -> None:
    message = common_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias=[common_pb2.LogitBias(token_id=4, bias=-100)],
        min_tokens=1,
        max_tokens=9,
        stop_token_ids=pack_tokens([2, 3]),
        logprobs=0,
        prompt_logprobs=3,
        allowed_token_ids=pack_tokens([5, 6]),
        bad_words=[pack_tokens([7, 8])],
    )
    assert sampling_from_proto(message) == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias=((4, -100.0),),
        min_tokens=1,
        max_tokens=9,
        stop_token_ids=frozenset({2, 3}),
        logprobs=0,
        prompt_logprobs=3,
        allowed_token_ids=(5, 6),
        bad_words=((7, 8),),
    )


def test_outputs_go_out_with_handle_and_sequence() -> None:
    logprobs = (PositionLogprobs(((70_000, -0.5), (3, -1.5)), 1),)
    message = output_to_proto(SequenceOutput(RequestId("s/7/2"), (70_000,), FinishReason.STOP, logprobs))
    assert (message.handle, message.sequence) == (7, 2)
    assert unpack_tokens(message.token_ids) == (70_000,)
    assert message.finish_reason == common_pb2.FINISH_REASON_STOP
    assert [(e.token_id, e.logprob) for e in message.logprobs[0].entries] == [(70_000, -0.5), (3, -1.5)]


def test_every_finish_reason_has_its_own_code() -> None:
    codes = {
        output_to_proto(SequenceOutput(RequestId("s/1/0"), (), reason)).finish_reason
        for reason in (None, *FinishReason)
    }
    assert codes == set(common_pb2.FinishReason.values())


def test_every_error_has_a_code() -> None:
    known = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ServingError)]
    assert len(known) >= 9
    for error_class in (*known, ValueError):
        failure = failure_to_proto(3, error_class("why"))
        assert failure.code != common_pb2.FAILURE_CODE_UNSPECIFIED
        assert (failure.handle, failure.message) == (3, "why")
    assert failure_to_proto(3, errors.Draining("")).code == common_pb2.FAILURE_CODE_DRAINING
    assert failure_to_proto(3, errors.Draining("")).message == "Draining"


def test_admission_load_and_events() -> None:
    request = request_from_proto(ADDRESS, generation(), vocab_size=100, arrival_s=0)
    admitted = admitted_to_proto(Admitted(request, (), (), 16, 0.25), num_fetched_tokens=32)
    assert (admitted.handle, admitted.num_cached_tokens, admitted.num_fetched_tokens) == (7, 16, 32)
    load = load_to_proto(EngineStats(num_running=1, num_loading=2, num_free_blocks=3, num_total_blocks=4), 1)
    assert (load.num_running, load.num_free_blocks, load.num_total_blocks, load.num_leased_blocks) == (3, 3, 4, 1)
    assert (load.prefill_token_s, load.block_fetch_s) == (0, 0), "not measured"
    load = load_to_proto(EngineStats(prefill_speed=PrefillSpeed(0.5, 0.25)), block_fetch_s=0.125)
    assert (load.prefill_token_s, load.prefill_position_s, load.block_fetch_s) == (0.5, 0.25, 0.125)
    events = kv_events_to_proto(9, [BlockHash(b"\x01" + bytes(31))], [BlockHash(bytes(7) + b"\x80" + b"x" * 24)])
    assert (events.first_sequence, list(events.stored_keys), list(events.dropped_keys)) == (9, [1], [1 << 63])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", pack_tokens([1, 100])),
        ("bad_words", [pack_tokens([1, 2]), pack_tokens([3, 100])]),
        ("bad_words", [b""]),
        ("allowed_token_ids", pack_tokens([100])),
        ("logit_bias", [common_pb2.LogitBias(token_id=100, bias=1.0)]),
    ],
)
def test_what_would_reach_past_the_logits_is_refused(field: str, value: object) -> None:
    """In the sampler it would be the end of the engine, and of the next node that the request is moved to."""
    sampling = common_pb2.SamplingParams(**{"max_tokens": 4, field: value})
    with pytest.raises(InvalidRequest) as caught:
        request_from_proto(ADDRESS, generation(sampling=sampling), vocab_size=100, arrival_s=0)
    assert caught.value.param == field
