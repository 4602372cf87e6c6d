from kvasir.router.pace import Pace


def test_nothing_waits_while_the_loop_keeps_up() -> None:
    pace = Pace(longest_s=0.2)
    for late_s in [0.001, 0.02, 0.02, 0.001] * 10:
        pace.look(late_s)
    assert pace.gap_s == 0


def test_tokens_wait_for_others_while_it_does_not_and_never_for_long() -> None:
    pace = Pace(longest_s=0.2)
    gaps = []
    for _ in range(100):
        pace.look(late_s=0.02)
        gaps.append(pace.gap_s)
    assert gaps == sorted(gaps)
    assert gaps[0] == 0 < gaps[2] < gaps[-1] == 0.2
    for _ in range(1000):
        pace.look(late_s=0.0)
    assert pace.gap_s == 0


def test_none_waits_where_none_may() -> None:
    pace = Pace(longest_s=0)
    for _ in range(10):
        pace.look(late_s=1.0)
    assert pace.gap_s == 0
