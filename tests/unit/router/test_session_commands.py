"""Commands over streams that break."""

from kvasir.common.grpc_options import MAX_MESSAGE_BYTES
from kvasir.proto import common_pb2, decode_pb2
from kvasir.router import wire
from kvasir.router.nodes import Role
from kvasir.router.session_commands import Commands


class Stream:
    def __init__(self) -> None:
        self.taken: list[decode_pb2.DecodeCommand] = []

    def send(self, message: bytes) -> None:
        self.taken.append(decode_pb2.DecodeCommand.FromString(message))

    @property
    def numbers(self) -> list[int]:
        return [command.number for command in self.taken]


def some_commands(number: int) -> Commands:
    commands = Commands()
    for handle in range(number):
        commands.add(wire.cancel(Role.DECODE, handle))
    return commands


def test_what_a_broken_stream_may_have_lost_is_sent_to_the_next() -> None:
    commands = some_commands(3)
    first, second = Stream(), Stream()
    commands.begin_stream(first.send, last_number=0)
    commands.add(wire.cancel(Role.DECODE, 3))
    assert first.numbers == [1, 2, 3, 4]
    commands.end_stream()
    commands.add(wire.cancel(Role.DECODE, 4))
    commands.begin_stream(second.send, last_number=2)
    commands.add(wire.cancel(Role.DECODE, 5))
    assert second.numbers == [3, 4, 5, 6]
    assert [command.cancel.handle for command in second.taken] == [2, 3, 4, 5]
    assert first.numbers == [1, 2, 3, 4]


def test_an_acknowledgement_has_no_number_and_is_not_kept() -> None:
    commands = some_commands(1)
    commands.send_aside(wire.acknowledge(Role.DECODE, 6))  # to nobody
    stream = Stream()
    commands.begin_stream(stream.send, last_number=0)
    commands.send_aside(wire.acknowledge(Role.DECODE, 7))
    assert stream.numbers == [1, 0]
    assert stream.taken[-1].acknowledge.last_event == 7
    commands.confirm(1)
    assert commands.all_confirmed


def test_what_has_arrived_is_kept_no_longer() -> None:
    commands = some_commands(3)
    commands.confirm(2)
    assert not commands.all_confirmed
    commands.confirm(3)
    assert commands.all_confirmed


def test_what_no_stream_would_carry_is_as_if_it_had_never_been() -> None:
    commands, stream = some_commands(1), Stream()
    request = common_pb2.GenerationRequest(prompt_token_ids=bytes(MAX_MESSAGE_BYTES))
    assert not commands.add(wire.start_decode(7, request, None))
    commands.begin_stream(stream.send, last_number=0)
    assert commands.add(wire.cancel(Role.DECODE, 1))
    assert stream.numbers == [1, 2]
    commands.confirm(2)
    assert commands.all_confirmed
