"""How much tokens weigh: e ** ((logit - largest) / temperature), in float64, as the reference has it.

What they all come to is summed a part of the row at a time, so that the part in which a number falls is found by the
parts' sums alone.
"""

import math
from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import compiled

# Shapes: V vocabulary  P parts of a row
PART = 64  # tokens
_LEAST = -708.0  # e ** of less is nothing, and so is what -inf weighs
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)
_STEEPEST = 1e300  # of what logits are multiplied by; so that the best one's 0 stays 0


@compiled
def weight(x: Any) -> Any:
    """e ** x for float64 x <= 0, in a form that compilers vectorise."""
    is_something, x = x >= _LEAST, max(x, _LEAST)
    whole = np.floor(x * _LOG2_E + 0.5)
    r = x - whole * _LN_2  # at most ln(2) / 2 on either side: terms beyond the 13th are lost in the rounding
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    exponent = np.int64(np.int32(whole) + np.int32(1023))  # by 32 bits, for which every CPU has an instruction
    p *= np.int64(exponent << np.int64(52)).view(np.float64)
    return p if is_something else 0.0


@compiled
def steepness(temperature: Any) -> Any:
    """What differences of logits are multiplied by."""
    return min(1 / temperature, _STEEPEST)


@compiled
def sum_parts(row: Any, largest: Any, scale: Any, sums: Any) -> Any:
    """sums [P] become those of the weights; their total"""
    total = 0.0
    for p in range(len(sums)):
        part = 0.0
        for i in range(p * PART, min((p + 1) * PART, len(row))):
            part += weight((np.float64(row[i]) - largest) * scale)
        sums[p] = part
        total += part
    return total


@compiled
def token_at(row: Any, largest: Any, best: Any, scale: Any, sums: Any, target: Any) -> Any:
    """The first token up to which the weights come to more than `target`; the last of any weight if they never do."""
    before, last = 0.0, best
    for p in range(len(sums)):
        if before + sums[p] <= target and p + 1 < len(sums):
            before += sums[p]
            continue
        for i in range(p * PART, min((p + 1) * PART, len(row))):
            mine = weight((np.float64(row[i]) - largest) * scale)
            before += mine
            if before > target:
                return i
            last = i if mine > 0 else last
    return last
