"""How long tokens of one node may wait for those behind them, so that one event carries several: by how late the event
loop is. Not at all unless it cannot keep up for a while; then a backlog would grow that costs everybody far more."""

import asyncio

_LOOK_EVERY_S = 0.01
_LOOK_AT_EASE_EVERY_S = 0.05  # each look costs some 0.1 ms where the loop had nothing to do
_LATE_S = 0.004  # a loop that is later than this has more to do than it can
_FOR_A_WHILE = 3  # times in a row
_UP_S, _DOWN_S = 0.005, 0.001


class Pace:
    def __init__(self, longest_s: float) -> None:
        self.gap_s = 0.0  # at least so long from one delivery to the next
        self._longest_s = longest_s
        self._times_late = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = _LOOK_EVERY_S if self._times_late or self.gap_s else _LOOK_AT_EASE_EVERY_S
            due_s = loop.time() + wait_s
            await asyncio.sleep(wait_s)
            self.look(loop.time() - due_s)

    def look(self, late_s: float) -> None:
        self._times_late = self._times_late + 1 if late_s > _LATE_S else 0
        change_s = _UP_S if self._times_late >= _FOR_A_WHILE else -_DOWN_S
        self.gap_s = min(self._longest_s, max(0.0, self.gap_s + change_s))
