"""The events of one engine step, sorted by session: one message each, however many requests."""

from kvasir.node.session import Session
from kvasir.proto import common_pb2


class Outbox:
    def __init__(self, step: int) -> None:
        self._step = step
        self._outputs: dict[Session, common_pb2.StepOutput] = {}

    def to(self, session: Session) -> common_pb2.StepOutput:
        if session not in self._outputs:
            self._outputs[session] = common_pb2.StepOutput(step=self._step)
        return self._outputs[session]

    def send(self) -> None:
        for session, output in self._outputs.items():
            session.tell(output)
