from kvasir.router.pace import Pace


def test_nothing_waits_while_the_loop_keeps_up() -> None:
    pace = Pace()
    for _ in range(10):
        pace.look(late_s=0.001)
    assert pace.gap_s == 0


def test_tokens_wait_for_others_while_it_does_not_and_never_for_long() -> None:
    pace = Pace()
    gaps = []
    for _ in range(100):
        pace.look(late_s=0.02)
        gaps.append(pace.gap_s)
    assert gaps == sorted(gaps)
    assert 0 < gaps[0] < gaps[-1] <= 0.2
    for _ in range(1000):
        pace.look(late_s=0.0)
    assert pace.gap_s == 0
