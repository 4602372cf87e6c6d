"""How far a model's distributions of the next token are from those of a reference."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

_ROWS_AT_ONCE = 64  # of logits

K = TypeVar("K")


def log_probabilities(logits: Tensor) -> Tensor:
    """[positions, V], in double precision."""
    return torch.log_softmax(logits.double(), -1)


@dataclass(eq=False, slots=True)
class Divergence:
    """Over positions of text."""

    num_equal: int = 0  # positions whose most probable token is the reference's
    kls: list[float] = field(default_factory=list)  # Kullback-Leibler, of each position, in nats

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Log probabilities of the reference and of what is held against it, both [positions, V]."""
        self.kls += (expected.exp() * (expected - found)).sum(-1).tolist()
        self.num_equal += int((expected.argmax(-1) == found.argmax(-1)).sum())

    @property
    def equal_best(self) -> float:
        """The share of positions."""
        return self.num_equal / len(self.kls)

    @property
    def mean_kl(self) -> float:
        return statistics.fmean(self.kls)

    @property
    def largest_kl(self) -> float:
        return max(self.kls)


def add_positions(
    found: Mapping[K, Divergence], hidden: Mapping[K, Tensor], logits: Callable[[K, Tensor], Tensor]
) -> None:
    """To what was found of each, what its hidden states [T, C] give; the first is the reference."""
    reference = next(iter(hidden))
    for first in range(0, len(hidden[reference]), _ROWS_AT_ONCE):
        rows = {name: logits(name, states[first : first + _ROWS_AT_ONCE]) for name, states in hidden.items()}
        expected = log_probabilities(rows[reference])
        for name, divergence in found.items():
            divergence.add(expected, log_probabilities(rows[name]))
