"""What a session has to tell its router: numbered, kept until acknowledged, merged while it cannot be sent.

        acknowledged | kept: sent, may be asked for again | kept: to be sent (again) | pending: not numbered yet
    ------ gone -----+------------------------------------+--------------------------+-------------------------->
                                                       cursor                     next number

Memory is bounded without losing anything: at most `max_kept` events are numbered and unacknowledged. Whatever happens
beyond that merges into one pending `StepOutput`, which can grow no larger than what the admitted requests may generate;
or into a few, where logprobs would make one too long for a message.
"""

from collections import deque

from kvasir.proto import common_pb2

MAX_KEPT_EVENTS = 1024
MAX_MERGED_LOGPROBS = 500_000  # of about 12 bytes each


class EventLog:
    """One session's events, in order."""

    def __init__(self, max_kept: int = MAX_KEPT_EVENTS) -> None:
        self._max_kept = max_kept
        self._kept: deque[common_pb2.SessionEvent] = deque()
        self._cursor = 0  # index into `_kept` of the next one to send
        self._next_number = 1
        self._pending_steps: deque[PendingStep] = deque()
        self._pending: deque[common_pb2.SessionEvent] = deque()  # others, without their numbers

    @property
    def last_number(self) -> int:
        return self._next_number - 1

    @property
    def is_delivered(self) -> bool:
        """All that there was to tell has been acknowledged."""
        return not (self._kept or self._pending or self._pending_steps)

    @property
    def is_full(self) -> bool:
        """Nothing is numbered before some of it is acknowledged."""
        return len(self._kept) >= self._max_kept

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def add_step(self, output: common_pb2.StepOutput) -> None:
        if not self._pending_steps or self._pending_steps[-1].num_logprobs >= MAX_MERGED_LOGPROBS:
            self._pending_steps.append(PendingStep())
        self._pending_steps[-1].merge(output)

    def add_failed(self, failed: common_pb2.RequestFailed) -> None:
        self._pending.append(common_pb2.SessionEvent(failed=failed))

    def add_kv_events(self, kv_events: common_pb2.KVEvents) -> None:
        self._pending.append(common_pb2.SessionEvent(kv_events=kv_events))

    def next_event(self) -> common_pb2.SessionEvent | None:
        """The next one to write; None if there is none, or too many wait for their acknowledgement."""
        if self._cursor == len(self._kept) and not self._number_one():
            return None
        self._cursor += 1
        return self._kept[self._cursor - 1]

    def acknowledge(self, last_event: int) -> None:
        """The router has seen all events up to this one."""
        while self._cursor and self._kept[0].number <= last_event:
            self._kept.popleft()
            self._cursor -= 1

    def resume(self, last_event: int) -> bool:
        """Send again from the one after `last_event`. False if that cannot be: forgotten, or never sent."""
        if last_event > self.last_number or last_event < self.last_number - len(self._kept):
            return False
        self._cursor = len(self._kept)
        self.acknowledge(last_event)
        self._cursor = 0
        return True

    def _number_one(self) -> bool:
        """Take one pending event. A step goes before a failure: that is the last word on its request."""
        if self.is_full:
            return False
        if self._pending_steps:
            event = common_pb2.SessionEvent(step=self._pending_steps.popleft().output)
        elif self._pending:
            event = self._pending.popleft()
        else:
            return False
        event.number = self._next_number
        self._next_number += 1
        self._kept.append(event)
        return True


class PendingStep:
    """Several steps' outputs as one: tokens appended, progress overtaken by later progress."""

    def __init__(self) -> None:
        self.output = common_pb2.StepOutput()
        self.num_logprobs = 0
        self._sequences: dict[tuple[int, int], common_pb2.SequenceOutput] = {}
        self._progress: dict[int, common_pb2.TicketProgress] = {}

    def merge(self, more: common_pb2.StepOutput) -> None:
        self.output.step = max(self.output.step, more.step)
        self.output.admitted.extend(more.admitted)
        self.output.transfers.extend(more.transfers)
        self.output.prompt_logprobs.extend(more.prompt_logprobs)
        for prompt in more.prompt_logprobs:
            self.num_logprobs += sum(len(position.entries) for position in prompt.positions)
        for sequence in more.outputs:
            self.num_logprobs += sum(len(position.entries) for position in sequence.logprobs)
            self._merge_sequence(sequence)
        for progress in more.progress:
            self._merge_progress(progress)

    def _merge_sequence(self, more: common_pb2.SequenceOutput) -> None:
        earlier = self._sequences.get((more.handle, more.sequence))
        if earlier is None:
            earlier = self._sequences[more.handle, more.sequence] = self.output.outputs.add()
            earlier.CopyFrom(more)
            return
        earlier.token_ids += more.token_ids
        earlier.logprobs.extend(more.logprobs)
        if more.finish_reason:
            earlier.finish_reason = more.finish_reason

    def _merge_progress(self, more: common_pb2.TicketProgress) -> None:
        earlier = self._progress.get(more.handle)
        if earlier is None:
            earlier = self._progress[more.handle] = self.output.progress.add()
        earlier.CopyFrom(more)
