"""Who hears what a node says of its requests, and when."""

import asyncio
from collections.abc import Callable

from kvasir.proto import common_pb2
from kvasir.router.node_events import Event, events_from_steps
from kvasir.router.pace import Pace

Sink = Callable[[Event], None]


class Sinks:
    """Of one session. Steps are delivered as they come, or several together where `pace` says so. `failed` is told
    where that cannot be done: what else the steps held is lost."""

    def __init__(self, pace: Pace, failed: Callable[[Exception], None]) -> None:
        self._pace = pace
        self._failed = failed
        self._sinks: dict[int, Sink] = {}
        self._last_handle = 0
        self._steps: list[common_pb2.StepOutput] = []  # that have come, and are to be delivered together
        self._timer: asyncio.TimerHandle | None = None
        self._delivered_s = 0.0

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: Sink) -> int:
        """Its handle: what is said of that one it hears, until it is removed."""
        self._last_handle += 1
        self._sinks[self._last_handle] = sink
        return self._last_handle

    def remove(self, handle: int) -> None:
        self._sinks.pop(handle, None)

    def step(self, step: common_pb2.StepOutput) -> None:
        self._steps.append(step)
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._delivered_s + self._pace.gap_s - loop.time()
        if wait_s <= 0:
            self.deliver()
        else:
            self._timer = loop.call_later(wait_s, self.deliver)

    def tell(self, handle: int, event: Event) -> None:
        """Behind the steps that have come."""
        self.deliver()
        sink = self._sinks.get(handle)
        if sink is not None:
            sink(event)

    def tell_all(self, make_event: Callable[[], Event]) -> None:
        """Each its own."""
        for sink in list(self._sinks.values()):
            sink(make_event())

    def deliver(self) -> None:
        """All steps that have come, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._delivered_s = asyncio.get_running_loop().time()
        steps, self._steps = self._steps, []
        sinks = self._sinks
        try:
            for handle, event in events_from_steps(steps):
                sink = sinks.get(handle)
                if sink is not None:  # otherwise it has been cancelled, and this was on its way
                    sink(event)
        except Exception as error:
            self._failed(error)
