"""How many tokens of prompts a step may take, so that those who decode in it get their next token in time. Pure.

    step = decoding + prompt tokens x seconds a token  <=  target

Both are measured, and the second answers faster upwards: a step that was too long is felt by everybody in it.
"""

from kvasir.engine.stats import StepMetrics

_AIM = 0.9  # of the target: steps vary
_RISE, _FALL = 0.5, 0.1  # weight of a newest step that was dearer, or cheaper, than thought
_MOST_RISE = 3.0  # at once: what took longer than that was something else


class StepBudget:
    """`min_tokens` are allowed however late a step is: a prompt that has begun always comes to its end.

    Otherwise it is a multiple of them, since a product of a size that is new may cost more than many of one known.
    """

    def __init__(self, target_itl_s: float, min_tokens: int) -> None:
        if target_itl_s <= 0 or min_tokens < 1:
            raise ValueError(f"a target of {target_itl_s} s and {min_tokens} tokens at least are no budget")
        self._target_s = target_itl_s
        self._min_tokens = min_tokens
        self._decode_s = 0.0  # of a step without prompts
        self._token_s = 0.0  # of one more prompt token

    def num_prefill_tokens(self, num_decoding: int, most: int) -> int:
        """At most `most`, which is all where nobody waits for a next token; else by what has been measured."""
        if num_decoding == 0:
            return most
        if self._token_s == 0:  # nothing is known yet: small steps tell
            return min(self._min_tokens, most)
        fitting = int((_AIM * self._target_s - self._decode_s) / self._token_s)
        return min(max(fitting // self._min_tokens, 1) * self._min_tokens, most)

    def note(self, step: StepMetrics) -> None:
        if step.num_prefill_tokens == 0:
            if step.num_decode_tokens:
                self._decode_s = _towards(self._decode_s, step.step_time_s)
        elif step.num_decode_tokens == 0:
            if self._token_s == 0:
                self._token_s = step.step_time_s / step.num_prefill_tokens
        elif 2 * step.num_prefill_tokens >= self._min_tokens:  # of fewer, the rest of a step says too much
            if step.step_time_s <= self._decode_s:  # so decoding takes less than it did when it was last alone
                prompts_s = step.num_prefill_tokens * self._token_s or step.step_time_s
                self._decode_s = max(step.step_time_s - prompts_s, 0.0)
            token_s = (step.step_time_s - self._decode_s) / step.num_prefill_tokens
            self._token_s = _towards(self._token_s, min(token_s, _MOST_RISE * self._token_s or token_s))


def _towards(old: float, new: float) -> float:
    """The first value counts whole."""
    return new if old == 0 else old + (_RISE if new > old else _FALL) * (new - old)
