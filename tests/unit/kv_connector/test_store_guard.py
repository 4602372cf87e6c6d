import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.store_guard import StoreGuard


def test_a_store_that_fails_is_left_alone_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    now_s, metrics = 100.0, TransferMetrics()
    guard = StoreGuard("writing to x", 5.0, lambda: now_s, metrics)

    def fail() -> None:
        with guard.attempt():
            raise KVTransferError("full")

    for _ in range(3):
        with pytest.raises(KVTransferError):
            fail()
    assert metrics.store_failures == 1  # the others never reached it
    assert len(caplog.records) == 1
    now_s += 5
    with pytest.raises(KVTransferError, match="full"):
        fail()
    assert metrics.store_failures == 2
    assert len(caplog.records) == 1  # one line for one outage
    now_s += 5
    with guard.attempt():
        pass
    with guard.attempt():
        pass
    assert guard.is_open


def test_slow_is_down() -> None:
    guard = StoreGuard("reading from x", 5.0, lambda: 0.0, TransferMetrics())
    with pytest.raises(KVTransferError, match="no answer in time"), guard.attempt():
        raise TimeoutError
    assert not guard.is_open


def test_after_a_while_one_tries_and_the_others_go_without() -> None:
    """A store that hangs would else take everybody's time, again and again."""
    now_s, metrics = 0.0, TransferMetrics()
    guard = StoreGuard("writing to x", 5.0, lambda: now_s, metrics)
    guard.failed("it hangs")
    now_s = 6.0
    with guard.attempt():
        assert not guard.is_open
        with pytest.raises(KVTransferError, match="left alone"), guard.attempt():
            pytest.fail("two at once")
    with guard.attempt(), guard.attempt():
        assert guard.is_open, "it works again, for all"
    assert metrics.failures == {"writing": 1}


def test_a_success_that_began_before_the_failure_is_no_news() -> None:
    now_s = 0.0
    guard = StoreGuard("reading from x", 5.0, lambda: now_s, TransferMetrics())
    with guard.attempt():
        guard.failed("another call timed out")
    assert not guard.is_open


def test_one_who_tries_and_is_cancelled_leaves_the_door_open() -> None:
    now_s = 0.0
    guard = StoreGuard("reading from x", 5.0, lambda: now_s, TransferMetrics())
    guard.failed("down")
    now_s = 6.0
    with pytest.raises(KeyboardInterrupt), guard.attempt():
        raise KeyboardInterrupt
    assert guard.is_open
