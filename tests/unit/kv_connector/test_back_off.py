"""Who could not be reached is left alone, for longer each time, and comes back at once when it can be reached."""

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.back_off import BackOff
from kvasir.kv_connector.errors import OtherVersion

GONE = KVTransferError("a is lost: nobody listens there")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_left_alone(back_off: BackOff, address: str = "a") -> bool:
    try:
        back_off.check(address)
    except KVTransferError:
        return True
    return False


def test_each_failure_doubles_the_wait_up_to_a_few_seconds() -> None:
    clock = Clock()
    back_off = BackOff(clock)
    waits_s = []
    for _ in range(9):
        assert not is_left_alone(back_off)
        back_off.failed("a", GONE)
        began_s = clock.now_s
        while is_left_alone(back_off):
            clock.now_s += 0.05
        waits_s.append(clock.now_s - began_s)
    assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], abs=0.06)


def test_others_are_not_left_alone_and_success_forgets() -> None:
    back_off = BackOff(Clock())
    back_off.failed("a", GONE)
    assert is_left_alone(back_off)
    assert not is_left_alone(back_off, "b")
    back_off.worked("a")
    assert not is_left_alone(back_off)


def test_memory_is_bounded() -> None:
    back_off = BackOff(Clock())
    for number in range(3000):
        back_off.failed(str(number), GONE)
    assert sum(is_left_alone(back_off, str(number)) for number in range(3000)) == 1024


def test_it_says_what_was_wrong() -> None:
    back_off = BackOff(Clock())
    back_off.failed("a", OtherVersion("a is lost: it speaks version 1"))
    with pytest.raises(OtherVersion, match=r"it speaks version 1; it is tried again in 0\.1 s"):
        back_off.check("a")
