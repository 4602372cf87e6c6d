"""How fast this node is, learnt from its own steps."""

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.engine.stats import StepMetrics

_NEWEST = 0.1  # weight of the newest step in a moving average
_TELLING = 1.5  # a step that takes hardly longer than one that only decodes says nothing of what its tokens cost
_KEPT = 0.97  # of a step's weight, when the next one comes
_MIN_SPREAD = 64.0  # tokens: contexts that differ by less say nothing of what a longer one costs


class PrefillMeter:
    """Seconds a token against position, a line through the steps, the newest counting most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, num_tokens: int, sum_of_positions: int, seconds: float) -> None:
        """One step, the decoding in it not counted."""
        if num_tokens <= 0 or seconds <= 0:
            return
        x, y = sum_of_positions / num_tokens, seconds / num_tokens
        weight = num_tokens**2  # squares of whole steps' errors: in long ones, what any step takes is little
        self._weight = _KEPT * self._weight + weight
        self._x = _KEPT * self._x + weight * x
        self._y = _KEPT * self._y + weight * y
        self._xx = _KEPT * self._xx + weight * x * x
        self._xy = _KEPT * self._xy + weight * x * y

    @property
    def speed(self) -> PrefillSpeed | None:
        """None before the first step."""
        if self._weight == 0:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / variance if variance > _MIN_SPREAD**2 else 0.0
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)  # neither part of the cost is negative
        return PrefillSpeed(mean_y - slope * mean_x, slope)


class StepTimes:
    """Moving averages, and what a prompt costs."""

    def __init__(self) -> None:
        self.step_time_s = 0.0
        self.decode_step_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._prefill = PrefillMeter()

    @property
    def prefill_speed(self) -> PrefillSpeed | None:
        return self._prefill.speed

    def note(self, step: StepMetrics) -> None:
        self.step_time_s = _average(self.step_time_s, step.step_time_s)
        if step.num_prefill_tokens == 0:
            self.decode_step_s = _average(self.decode_step_s, step.step_time_s)
        elif step.num_prefill_tokens > step.num_decode_tokens and step.step_time_s > 0:
            rate = step.num_prefill_tokens / step.step_time_s
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, rate)
        if step.step_time_s > _TELLING * self.decode_step_s:
            decode_s = self.decode_step_s if step.num_decode_tokens else 0.0
            self._prefill.note(step.num_prefill_tokens, step.sum_of_prefill_positions, step.step_time_s - decode_s)


def _average(old: float, new: float) -> float:
    """The first value counts whole."""
    return new if old == 0 else old + _NEWEST * (new - old)
