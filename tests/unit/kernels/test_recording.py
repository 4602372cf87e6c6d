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


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_recording_runs_for_any_number_of_rows(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        chain, buffers, traces = Chain(), Buffers(), []
        hidden, residual = torch.zeros(20, 64), torch.zeros(20, 64)
        for num_rows in (19, 20):
            out = None
            with record(buffers, num_rows, 20) as steps:
                out = chain.loops_alone(hidden[:num_rows], residual[:num_rows])
            traces.append(steps)
        recording = Recording(traces[1], with_one_less=traces[0])
        assert out is not None
        for num_rows in (20, 1, 13, 2, 20):
            hidden.normal_()
            residual.normal_()
            before_it, behind = residual.clone(), out[num_rows:].clone()
            expected = chain.loops_alone(hidden[:num_rows].clone(), before_it[:num_rows])
            recording.run(num_rows)
            assert torch.equal(out[:num_rows], expected)
            assert torch.equal(residual, before_it), "rows behind them are left alone"
            assert torch.equal(out[num_rows:], behind)
    finally:
        torch.set_num_threads(before)


def test_loops_that_depend_on_the_number_of_rows_in_other_ways_are_refused() -> None:
    chain, norm = Chain(), torch.rand(64)
    hidden, residual = torch.zeros(20, 64), torch.zeros(20, 64)
    one, another = Buffers(), Buffers()  # both are kept, or the second might get the place of the first
    with record(one) as longer:
        chain.loops_alone(hidden, residual)
    with record(another) as elsewhere:
        chain.loops_alone(hidden[:19], residual[:19])
    with pytest.raises(NotRecordable, match="another number"):
        Recording(longer, with_one_less=elsewhere)
    with record(Buffers()) as other:
        rms_norm(hidden[:19], norm, 1e-5, residual[:19])
    with pytest.raises(NotRecordable, match="other loops"):
        Recording(longer, with_one_less=other)


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
