"""The part of a fetch that is asked for, read and handed over at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.kv_connector.base import BlockKey, Frame
from kvasir.kv_connector.one_sided import protocol


@dataclass(frozen=True, slots=True)
class Lent:
    """The sender lends us this block of its pool; our engine has to read it."""

    header: bytes
    block: int


Answer = Lent | Frame | None  # to be read by our engine; sent inline; not there


@dataclass(eq=False, slots=True)
class Batch:
    """Some keys of one fetch, and a staging slot for each.

    Once begun, a batch is always completed, even if its fetch has been cancelled meanwhile: the engine must have let go
    of a slot before anything else may use it.
    """

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    frames: asyncio.Task[list[Frame | None]]
    answers: asyncio.Future[list[Answer]]
    _answers: dict[int, Answer] = field(default_factory=dict)

    def take(self, index: int, answer: Answer) -> None:
        """The sender's answer for `keys[index]`. With the last one, `answers` is complete."""
        if index >= len(self.keys):
            raise protocol.BadMessage(f"it sent block {index} of {len(self.keys)}")
        self._answers[index] = answer
        if len(self._answers) == len(self.keys) and not self.answers.done():
            self.answers.set_result([self._answers[i] for i in range(len(self.keys))])
