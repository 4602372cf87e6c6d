"""Prompt tokens a step, from scripted steps: the target is kept where it can be; where it cannot, no prompt starves."""

from collections.abc import Callable

import pytest

from kvasir.engine.stats import StepMetrics
from kvasir.engine.step_budget import StepBudget

TARGET_S = 0.050


def run(budget: StepBudget, num_steps: int, step_s: Callable[[int, int], float]) -> list[tuple[int, float]]:
    """(prompt tokens, seconds) of each step, with 8 requests decoding and a prompt that never ends."""
    steps = []
    for number in range(num_steps):
        num_tokens = budget.num_prefill_tokens(8, 512)
        seconds = step_s(number, num_tokens)
        budget.note(metrics(number, seconds, num_tokens, 8))
        steps.append((num_tokens, seconds))
    return steps


def metrics(step: int, seconds: float, num_prefill: int, num_decode: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        step_time_s=seconds,
        num_seqs=num_decode + 1,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_decode,
        queue_s=(),
    )


def decoded_once(target_s: float = TARGET_S, min_tokens: int = 16) -> StepBudget:
    budget = StepBudget(target_s, min_tokens)
    budget.note(metrics(0, 0.020, 0, 8))
    return budget


def test_it_settles_just_below_the_target() -> None:
    steps = run(decoded_once(), 60, lambda _, num_tokens: 0.020 + num_tokens * 0.0002)
    assert max(seconds for _, seconds in steps) <= TARGET_S
    assert steps[-1] == (112, pytest.approx(0.0424))


def test_it_follows_a_context_that_grows_dearer() -> None:
    steps = run(decoded_once(), 200, lambda number, num_tokens: 0.020 + num_tokens * 0.0002 * (1 + number / 50))
    assert max(seconds for _, seconds in steps) <= TARGET_S
    assert steps[-1][0] < steps[10][0] / 2


def test_a_sudden_rise_is_felt_once() -> None:
    steps = run(decoded_once(), 60, lambda number, num_tokens: 0.020 + num_tokens * (0.0002 if number < 30 else 0.0006))
    late = [number for number, (_, seconds) in enumerate(steps) if seconds > TARGET_S]
    assert late
    assert set(late) <= set(range(30, 34))


def test_where_decoding_alone_is_late_prompts_still_come_to_their_end() -> None:
    budget = decoded_once(target_s=0.010)
    steps = run(budget, 100, lambda _, num_tokens: 0.020 + num_tokens * 0.0002)
    assert {num_tokens for num_tokens, _ in steps} == {16}
    assert {n for n, _ in run(decoded_once(0.010, 1), 100, lambda _, n: 0.02 + n * 0.0002)} == {1}


def test_a_slow_time_is_forgotten_also_while_prompts_never_pause() -> None:
    """The batch that decodes became small while steps without prompts, which would tell, are not to be had."""
    budget = StepBudget(TARGET_S, 16)
    budget.note(metrics(0, 0.060, 0, 64))
    steps = run(budget, 200, lambda _, num_tokens: 0.010 + num_tokens * 0.0002)
    assert steps[0][0] == 16
    assert steps[-1][0] > 100
    assert max(seconds for _, seconds in steps) <= TARGET_S


def test_where_nobody_decodes_there_is_nobody_to_wait() -> None:
    budget = decoded_once()
    assert budget.num_prefill_tokens(0, 512) == 512
    budget.note(metrics(1, 0.100, 512, 0))
    assert 16 <= budget.num_prefill_tokens(1, 512) < 200
    assert budget.num_prefill_tokens(1, 5) == 5
    assert budget.num_prefill_tokens(1, 0) == 0


def test_what_is_no_budget() -> None:
    for target_s, min_tokens in ((0.0, 1), (-1.0, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="no budget"):
            StepBudget(target_s, min_tokens)
