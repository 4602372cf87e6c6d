from typing import Any

import pytest

from kvasir.common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NodeUnavailable,
    NumericalError,
    Overloaded,
)
from kvasir.common.tokens import pack_tokens
from kvasir.proto import common_pb2
from kvasir.router.node_events import (
    Admitted,
    Progress,
    Tokens,
    Transferred,
    error_from_failure,
    events_from_step,
    events_from_steps,
)
from kvasir.router.types import PositionLogprobs


def test_tokens_of_several_steps_come_together_and_last() -> None:
    def output(handle: int, token: int, reason: common_pb2.FinishReason.ValueType = 0) -> common_pb2.SequenceOutput:
        entry = common_pb2.TokenLogprob(token_id=token, logprob=-token)
        logprobs = [common_pb2.PositionLogprobs(entries=[entry], rank=1)]
        return common_pb2.SequenceOutput(
            handle=handle, token_ids=pack_tokens([token]), finish_reason=reason, logprobs=logprobs
        )

    steps = [
        common_pb2.StepOutput(outputs=[output(1, 10), output(2, 20)]),
        common_pb2.StepOutput(outputs=[output(1, 11, common_pb2.FINISH_REASON_STOP)], admitted=[{"handle": 3}]),
        common_pb2.StepOutput(outputs=[output(3, 30)]),
    ]
    scores = [PositionLogprobs(((token, float(-token)),), 1) for token in (10, 11, 20, 30)]
    assert list(events_from_steps(steps)) == [
        (3, Admitted(0, 0)),
        (1, Tokens((10, 11), "stop", (scores[0], scores[1]))),
        (2, Tokens((20,), None, (scores[2],))),
        (3, Tokens((30,), None, (scores[3],))),
    ]
    assert list(events_from_steps(steps[:1])) == list(events_from_step(steps[0]))
    assert list(events_from_steps([])) == []


def test_the_events_of_a_step_come_in_the_order_of_a_requests_life() -> None:
    logprobs = common_pb2.PositionLogprobs(entries=[common_pb2.TokenLogprob(token_id=5, logprob=-0.5)], rank=2)
    step = common_pb2.StepOutput(
        outputs=[
            common_pb2.SequenceOutput(
                handle=1, token_ids=b"\5\0\0\0", finish_reason=common_pb2.FINISH_REASON_HANDED_OFF, logprobs=[logprobs]
            ),
            common_pb2.SequenceOutput(handle=2, sequence=3, token_ids=b"\6\0\0\0\7\0\0\0"),
        ],
        progress=[common_pb2.TicketProgress(handle=1, num_blocks=3, committed=True)],
        admitted=[common_pb2.RequestAdmitted(handle=1, num_cached_tokens=16, num_fetched_tokens=32)],
        transfers=[
            common_pb2.TransferReport(
                handle=3,
                num_blocks_fetched=4,
                num_tokens_recomputed=5,
                transfer_s=0.5,
                overlapped_s=0.25,
                num_bytes=6,
            )
        ],
    )
    assert list(events_from_step(step)) == [
        (1, Admitted(16, 32)),
        (3, Transferred(4, 0.5, 0.25, 6)),
        (1, Progress(3, True)),
        (1, Tokens((5,), "handed_off", (PositionLogprobs(((5, -0.5),), 2),))),
        (2, Tokens((6, 7), None, (), 3)),
    ]


@pytest.mark.parametrize("code", common_pb2.FailureCode.values())
def test_every_failure_code_has_an_error(code: Any) -> None:
    errors = {
        common_pb2.FAILURE_CODE_INVALID_REQUEST: InvalidRequest,
        common_pb2.FAILURE_CODE_OVERLOADED: Overloaded,
        common_pb2.FAILURE_CODE_DRAINING: Draining,
        common_pb2.FAILURE_CODE_DEADLINE_EXCEEDED: DeadlineExceeded,
        common_pb2.FAILURE_CODE_NUMERICAL: NumericalError,
    }
    failure = common_pb2.RequestFailed(handle=1, code=code, message="why")
    error = error_from_failure(failure, "a:1")
    assert type(error) is errors.get(code, NodeUnavailable)
    assert "why" in str(error)
