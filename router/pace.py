"""How long tokens of one node may wait for those behind them, so that one event carries several: by how late the event
loop is. Not at all unless it cannot keep up; then a
backlog would grow that costs everybody far more."""

import asyncio

_LOOK_EVERY_S = 0.01
_LATE_S = 0.004  # a loop that is later than this has more to do than it can
_LONGEST_S = 0.2
_UP_S, _DOWN_S = 0.005, 0.001


class Pace:
    def __init__(self) -> None:
        self.gap_s = 0.0  # at least so long from one delivery to the next

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look(loop.time() - due_s)

    def look(self, late_s: float) -> None:
        change_s = _UP_S if late_s > _LATE_S else -_DOWN_S
        self.gap_s = min(_LONGEST_S, max(0.0, self.gap_s + change_s))
