import math
from dataclasses import replace
from typing import Any

import pytest

from kvasir.common.grammar import Grammar
from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.common.tokens import unpack_tokens
from kvasir.proto import common_pb2
from kvasir.router import wire
from kvasir.router.nodes import Role
from kvasir.router.types import RoutedRequest, Sampling
from tests.unit.router.test_pool import info


def test_every_sampling_field_travels() -> None:
    """A field that is added to the one and forgotten in the other is found here."""
    sampling = Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((5, -100.0), (6, 1.5)),
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=frozenset({7, 3}),
        logprobs=0,
        prompt_logprobs=4,
        allowed_token_ids=(1, 2),
        bad_words=((1, 2), (3,)),
        grammar=Grammar("regex", "a|b"),
    )
    message = wire.sampling_to_proto(sampling)
    sent = {descriptor.name for descriptor, _ in message.ListFields()}
    assert sent == {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert message.seed == 2**64 - 1
    assert [(bias.token_id, bias.bias) for bias in message.logit_bias] == [(5, -100.0), (6, 1.5)]
    assert unpack_tokens(message.stop_token_ids) == (3, 7)
    assert [unpack_tokens(word) for word in message.bad_words] == [(1, 2), (3,)]
    assert message.HasField("logprobs")
    assert not wire.sampling_to_proto(Sampling()).HasField("logprobs")
    assert message.grammar == common_pb2.Grammar(regex="a|b")
    assert not wire.sampling_to_proto(Sampling()).HasField("grammar")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_a_grammar_travels_as_its_source(kind: Any) -> None:
    message = wire.grammar_to_proto(Grammar(kind, "ü"))
    assert (message.WhichOneof("source"), getattr(message, kind)) == (kind, "ü")


def test_a_request_that_moves_keeps_the_border_between_prompt_and_output() -> None:
    request = RoutedRequest(request_id="r", prompt_token_ids=(1, 2, 3), cache_salt="s", priority=-2)
    message = wire.request_to_proto(request, (4, 5), 1.5)
    assert unpack_tokens(message.prompt_token_ids) == (1, 2, 3)
    assert [unpack_tokens(packed) for packed in message.output_token_ids] == [(4, 5)]
    assert (message.cache_salt, message.priority, message.deadline_s, message.num_sequences) == ("s", -2, 1.5, 1)
    assert wire.request_to_proto(replace(request, num_sequences=5), (), None).num_sequences == 5
    fresh = wire.request_to_proto(request, (), None)
    assert not fresh.output_token_ids
    assert not fresh.HasField("deadline_s")


def test_only_who_computes_a_prompt_is_asked_for_its_logprobs() -> None:
    request = RoutedRequest(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(prompt_logprobs=0))
    message = wire.request_to_proto(request, (), None)
    ticket = wire.ticket_to(info(), "t")
    for command, is_asked in (
        (wire.start_prefill(1, message, ticket), True),
        (wire.start_decode(1, message, ticket), False),
        (wire.start_decode(1, message, None), True),
    ):
        assert command.start.request.sampling.HasField("prompt_logprobs") is is_asked
        assert command.start.request.prompt_token_ids == message.prompt_token_ids


def test_a_store_has_no_endpoint() -> None:
    ticket = wire.ticket_to(info(), "t")
    assert (ticket.transfer_id, ticket.connector) == ("t", "tcp")
    assert [(one.address, one.first_kv_head, one.num_kv_heads) for one in ticket.endpoints] == [("a:2", 0, 2)]
    assert not wire.ticket_to(info(kv_endpoint=""), "t").endpoints
    assert wire.ticket_to(info(kv_stored_as="int8-float32"), "t").stored_as == "int8-float32"


def test_commands_are_of_their_service() -> None:
    for role, name in ((Role.PREFILL, "PrefillCommand"), (Role.DECODE, "DecodeCommand")):
        for command in (wire.cancel(role, 3), wire.acknowledge(role, 4), wire.open_session(role, "s", 5)):
            assert type(command).__name__ == name
    assert wire.cancel(Role.DECODE, 3).cancel.handle == 3


def test_what_is_no_time_was_not_measured() -> None:
    for odd in (0.0, -1.0, math.inf, math.nan):
        load = wire.load_from_proto(common_pb2.NodeLoad(prefill_token_s=odd, decode_step_s=odd, block_fetch_s=odd))
        assert (load.prefill_speed, load.decode_step_s, load.block_fetch_s) == (None, 0.0, 0.0)
    load = wire.load_from_proto(common_pb2.NodeLoad(prefill_position_s=0.5, decode_step_s=0.25, block_fetch_s=0.125))
    assert (load.prefill_speed, load.decode_step_s, load.block_fetch_s) == (PrefillSpeed(0.0, 0.5), 0.25, 0.125)
