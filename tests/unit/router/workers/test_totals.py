"""What the parent makes of its workers' metrics."""

from prometheus_client.parser import text_string_to_metric_families

from kvasir.common.metrics import Metrics, Sample
from kvasir.router.workers.totals import Totals


class Process:
    """A worker's metrics."""

    def __init__(self, num_free_blocks: int) -> None:
        self.metrics = Metrics({"model_name": 'm "1"\\'})
        self.requests = self.metrics.counter("kvasir:requests", "Requests.", ["how"])
        self.running = self.metrics.gauge("kvasir:running", "Running.")
        self.seconds = self.metrics.histogram("kvasir:seconds", "Seconds.", (0.1, 1.0))
        self.metrics.sampled(lambda: [Sample("kvasir:node_free_blocks", "Free.", num_free_blocks, {"address": "a"})])

    @property
    def text(self) -> str:
        return self.metrics.render()[0].decode()


def totals_of(totals: Totals) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(totals.render().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels.get("model_name", 'm "1"\\') == 'm "1"\\'
            found[sample.name + "".join(f" {value}" for value in labels.values())] = sample.value
    return found


def test_counts_add_up_and_what_all_see_is_seen_once() -> None:
    totals, first, second = Totals(), Process(num_free_blocks=7), Process(num_free_blocks=5)
    first.requests(2, how="well")
    second.requests(3, how="well")
    second.requests(1, how="badly")
    first.running(4)
    second.running(1)
    first.seconds(0.05)
    second.seconds(0.5)
    totals.note(0, first.text)
    totals.note(1, second.text)
    found = totals_of(totals)
    assert (found["kvasir:requests_total well"], found["kvasir:requests_total badly"]) == (5, 1)
    assert found["kvasir:running"] == 5
    assert found["kvasir:node_free_blocks a"] == 5
    buckets = [found[f"kvasir:seconds_bucket {bound}"] for bound in ("0.1", "1.0", "+Inf")]
    assert (buckets, found["kvasir:seconds_count"], found["kvasir:seconds_sum"]) == ([1, 2, 2], 2, 0.55)


def test_what_a_dead_worker_has_counted_stays_and_what_it_was_doing_does_not() -> None:
    totals, first, second = Totals(), Process(7), Process(5)
    for number, process in enumerate((first, second)):
        process.requests(10, how="well")
        process.running(3)
        process.seconds(0.5)
        totals.note(number, process.text)
    totals.died(1)
    assert totals_of(totals)["kvasir:requests_total well"] == 20
    assert totals_of(totals)["kvasir:running"] == 3
    assert totals_of(totals)["kvasir:node_free_blocks a"] == 7
    again = Process(6)
    again.requests(1, how="well")
    totals.note(1, again.text)
    totals.died(1)
    totals.died(1)
    found = totals_of(totals)
    assert found["kvasir:requests_total well"] == 21
    assert found["kvasir:seconds_count"] == 2


def test_without_any_worker_there_is_nothing() -> None:
    assert totals_of(Totals()) == {}
