import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.node.event_log import EventLog
from kvasir.proto import common_pb2


def step(number: int, **tokens: int) -> common_pb2.StepOutput:
    """`step(3, h7=11)`: step 3 gave token 11 to handle 7"""
    outputs = [
        common_pb2.SequenceOutput(handle=int(handle[1:]), token_ids=pack_tokens([token]))
        for handle, token in tokens.items()
    ]
    return common_pb2.StepOutput(step=number, outputs=outputs)


def failed(handle: int) -> common_pb2.RequestFailed:
    return common_pb2.RequestFailed(handle=handle, message="why")


def take_all(log: EventLog) -> list[common_pb2.SessionEvent]:
    events = []
    while (event := log.next_event()) is not None:
        events.append(event)
    return events


def tokens_of(events: list[common_pb2.SessionEvent], handle: int) -> list[int]:
    return [
        token
        for event in events
        for output in event.step.outputs
        if output.handle == handle
        for token in unpack_tokens(output.token_ids)
    ]


def test_events_are_numbered_from_one_without_gaps() -> None:
    log = EventLog()
    log.add_step(step(1, h1=5))
    assert [event.number for event in take_all(log)] == [1]
    log.add_failed(failed(1))
    log.add_kv_events(common_pb2.KVEvents(first_sequence=1))
    assert [event.number for event in take_all(log)] == [2, 3]
    assert log.next_event() is None


def test_what_cannot_be_sent_merges_into_one_step() -> None:
    log = EventLog()
    progress = common_pb2.TicketProgress(handle=9, num_blocks=1)
    for number in range(1, 101):
        output = step(number, h1=number, h2=number + 1000)
        progress.num_blocks = number
        progress.committed = number == 100
        output.progress.append(progress)
        log.add_step(output)
    last = common_pb2.SequenceOutput(handle=1, finish_reason=common_pb2.FINISH_REASON_STOP)
    log.add_step(common_pb2.StepOutput(step=101, outputs=[last]))
    log.add_step(common_pb2.StepOutput(admitted=[common_pb2.RequestAdmitted(handle=3)]))
    (event,) = take_all(log)
    assert event.step.step == 101
    assert tokens_of([event], 1) == list(range(1, 101))
    assert tokens_of([event], 2) == list(range(1001, 1101))
    assert [output.finish_reason for output in event.step.outputs] == [common_pb2.FINISH_REASON_STOP, 0]
    (only_progress,) = event.step.progress
    assert (only_progress.num_blocks, only_progress.committed) == (100, True)
    assert event.step.admitted[0].handle == 3


def test_merging_keeps_the_logprobs_of_every_token() -> None:
    log = EventLog()
    for token in (4, 5):
        output = step(token, h1=token)
        output.outputs[0].logprobs.add(rank=token)
        log.add_step(output)
    (event,) = take_all(log)
    assert [one.rank for one in event.step.outputs[0].logprobs] == [4, 5]


def test_a_failure_comes_after_the_tokens_of_its_request() -> None:
    log = EventLog()
    log.add_step(step(1, h1=5))
    log.add_failed(failed(1))
    log.add_step(step(2, h2=6))
    kinds = [event.WhichOneof("event") for event in take_all(log)]
    assert kinds == ["step", "failed"]


def test_two_sequences_of_one_request_stay_apart() -> None:
    log = EventLog()
    for sequence in (0, 1, 0):
        output = common_pb2.SequenceOutput(handle=1, sequence=sequence, token_ids=pack_tokens([sequence]))
        log.add_step(common_pb2.StepOutput(outputs=[output]))
    (event,) = take_all(log)
    assert [unpack_tokens(output.token_ids) for output in event.step.outputs] == [(0, 0), (1,)]


def test_resume_sends_again_what_was_not_seen_and_nothing_else() -> None:
    log = EventLog()
    for number in range(1, 6):
        log.add_step(step(number, h1=number))
        log.next_event()
    log.acknowledge(2)
    log.add_step(step(6, h1=6))
    assert log.resume(3)
    events = take_all(log)
    assert [event.number for event in events] == [4, 5, 6]
    assert tokens_of(events, 1) == [4, 5, 6]
    assert log.num_kept == 3


def test_resume_is_refused_for_what_is_forgotten_or_was_never_sent() -> None:
    log = EventLog()
    assert log.resume(0), "nothing has been sent, nothing is missing"
    for number in range(1, 4):
        log.add_step(step(number, h1=number))
        log.next_event()
    log.acknowledge(2)
    assert not log.resume(1)
    assert not log.resume(0)
    assert not log.resume(4)
    assert log.resume(2)
    assert log.resume(3)


def test_a_resume_may_be_cut_off_and_resumed_again() -> None:
    log = EventLog()
    for number in range(1, 6):
        log.add_step(step(number, h1=number))
        log.next_event()
    assert log.resume(1)
    assert [event.number for event in (log.next_event(), log.next_event()) if event] == [2, 3]
    log.acknowledge(2)
    assert log.resume(2)
    assert [event.number for event in take_all(log)] == [3, 4, 5]


def test_an_acknowledgement_of_what_was_not_sent_changes_nothing() -> None:
    log = EventLog()
    for number in range(1, 4):
        log.add_step(step(number, h1=number))
        log.next_event()
    assert log.resume(0)
    log.next_event()
    log.acknowledge(99)
    assert [event.number for event in take_all(log)] == [2, 3]


def test_without_acknowledgements_memory_is_bounded_and_nothing_is_lost() -> None:
    log = EventLog(max_kept=8)
    sent = []
    for number in range(1, 1001):
        log.add_step(step(number, h1=number))
        sent += take_all(log)
    assert log.num_kept == 8
    assert len(sent) == 8
    log.acknowledge(sent[-1].number)
    sent += take_all(log)
    assert tokens_of(sent, 1) == list(range(1, 1001))
    assert [event.number for event in sent] == list(range(1, 10))


@given(st.lists(st.sampled_from(["step", "fail", "send", "ack", "resume"]), max_size=60), st.randoms())
def test_a_reader_that_resumes_anywhere_sees_every_token_once_and_in_order(actions: list[str], random: object) -> None:
    """The reader keeps what it reads, acknowledges some of it, loses its stream and comes back."""
    log = EventLog(max_kept=5)
    seen: list[common_pb2.SessionEvent] = []
    num_steps = num_failed = 0

    def read() -> bool:
        event = log.next_event()
        if event is not None:
            assert event.number == len(seen) + 1
            seen.append(event)
        return event is not None

    for action in actions:
        if action == "step":
            num_steps += 1
            log.add_step(step(num_steps, h1=num_steps))
        elif action == "fail":
            num_failed += 1
            log.add_failed(failed(num_failed))
        elif action == "send":
            read()
        elif action == "ack":
            log.acknowledge(random.randint(0, len(seen)))  # type: ignore[attr-defined]
        elif log.num_kept:
            log.next_event()  # written, but lost on the way
            assert log.resume(len(seen))
        assert log.num_kept <= 5
    log.resume(len(seen))
    while read():
        log.acknowledge(len(seen))
    assert tokens_of(seen, 1) == list(range(1, num_steps + 1))
    assert [event.failed.handle for event in seen if event.HasField("failed")] == list(range(1, num_failed + 1))


def test_logprobs_that_pile_up_become_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message has a size limit, and what scored prompts say is long."""
    monkeypatch.setattr("kvasir.node.event_log.MAX_MERGED_LOGPROBS", 10)
    log = EventLog()
    position = common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=1)] * 2)
    for number in range(1, 13):
        output = step(number, h1=number)
        if number % 2:
            output.prompt_logprobs.append(common_pb2.PromptLogprobs(handle=2, positions=[position] * 2))
        else:
            output.outputs[0].logprobs.append(position)
        log.add_step(output)
    log.add_failed(failed(3))
    events = take_all(log)
    assert tokens_of(events, 1) == list(range(1, 13))
    assert [len(event.step.prompt_logprobs) for event in events] == [2, 2, 2, 0, 0]
    assert [event.WhichOneof("event") for event in events] == ["step"] * 4 + ["failed"]
    assert log.is_delivered is False
    log.acknowledge(events[-1].number)
    assert log.is_delivered
