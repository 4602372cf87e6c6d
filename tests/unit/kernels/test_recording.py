"""Loops that are recorded and run again, against the same loops launched one by one."""

import pytest
import torch

from kvasir.kernels.cpu.recording import Buffers, NotRecordable, Recording, record
from kvasir.kernels.linear import PackedLinear
from kvasir.kernels.rms_norm import rms_norm
from kvasir.kernels.silu_mul import silu_mul


class Chain:
    """A few layers of loops, with a residual that is changed in place."""

    def __init__(self) -> None:
        self._norm = torch.rand(64)
        self._layers = [(PackedLinear(torch.randn(96, 64)), PackedLinear(torch.randn(64, 48))) for _ in range(20)]

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for up, down in self._layers:
            hidden = down(silu_mul(up(rms_norm(hidden, self._norm, 1e-5, residual)))) * 1
        return hidden

    def loops_alone(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for up, down in self._layers:
            hidden = down(silu_mul(up(rms_norm(hidden, self._norm, 1e-5, residual))))
        return hidden


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_a_recording_does_what_was_recorded(num_threads: int, num_tokens: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _compare(Chain(), num_tokens)
    finally:
        torch.set_num_threads(before)


def _compare(chain: Chain, num_tokens: int) -> None:
    hidden, residual, buffers = torch.zeros(num_tokens, 64), torch.zeros(num_tokens, 64), Buffers()
    with record(buffers) as steps:
        out = chain.loops_alone(hidden, residual)
    assert len(steps) == 20 * 4
    assert not residual.any(), "nothing runs while it is recorded"
    recording = Recording(steps)
    for _ in range(30):
        hidden.normal_()
        residual.normal_()
        expected_residual = residual.clone()
        expected = chain.loops_alone(hidden.clone(), expected_residual)
        recording.run()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    buffers = Buffers()
    first = buffers.tensor((3, 5), torch.float32)
    view, address = first[1:], first.data_ptr()
    del first
    assert buffers.tensor((15,), torch.float32).data_ptr() != address, "a view still looks at it"
    del view
    assert buffers.tensor((5, 3), torch.float32).data_ptr() == address
    assert address % 64 == 0


def test_what_a_recording_would_leave_out_is_refused() -> None:
    chain = Chain()
    hidden, residual = torch.ones(2, 64), torch.zeros(2, 64)
    with pytest.raises(NotRecordable, match="aten::mul"), record(Buffers()):
        chain(hidden, residual)
    assert chain(hidden, residual).any(), "launches run again after it"
