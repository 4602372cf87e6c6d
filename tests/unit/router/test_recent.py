from kvasir.router.recent import Recent


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_latencies_are_summed_up_by_slices_and_old_ones_fall_out() -> None:
    clock = Clock()
    recent = Recent(clock, slice_s=5, num_slices=3)
    for gap_ms in range(1, 101):
        recent.tokens(1, gap_ms / 1000, clock())
    recent.first_token(0.5)
    recent.tokens(7, None, clock())
    clock.now_s += 5
    recent.tokens(1, None, clock())

    oldest, middle, newest = recent.summaries([recent.slices()])
    assert (oldest.end_s, middle.end_s, newest.end_s) == (-10, -5, 0)
    assert oldest.itl_p50_s is None
    assert (middle.itl_p50_s, middle.itl_p99_s, middle.ttft_p50_s, middle.num_tokens) == (0.05, 0.099, 0.5, 107)
    assert (newest.itl_p50_s, newest.num_tokens) == (None, 1)

    clock.now_s += 15
    assert all(one.num_tokens == 0 for one in recent.summaries([recent.slices()]))


def test_what_is_kept_is_bounded() -> None:
    recent = Recent(Clock())
    for index in range(5000):
        recent.tokens(1, index, Clock.now_s)
        recent.served(f"answer-{index}", "a:1")
    assert recent.summaries([recent.slices()])[-1].itl_p50_s == 5000 - 513  # of the newest 1024
    assert recent.served_by("answer-0") == []
    assert recent.served_by("answer-4999") == ["a:1"]


def test_an_answer_names_its_nodes_in_order_and_once_in_a_row() -> None:
    recent = Recent(Clock())
    for node in ("p:1", "d:1", "d:1", "d:2", ""):
        recent.served("answer", node)
    assert recent.served_by("answer") == ["p:1", "d:1", "d:2"]
