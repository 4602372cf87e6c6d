"""Memory in which what was not written shows."""

import pytest
import torch
from torch import Tensor


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives the launchers is full of NaN, or of a number that is no token."""
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> Tensor:
        memory: Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return memory.fill_(torch.nan if memory.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
