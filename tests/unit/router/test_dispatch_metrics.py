from kvasir.common.metrics import Metrics
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.node_events import Transferred


def test_transfers_are_counted_with_the_share_that_lay_beside_the_prefill() -> None:
    metrics = Metrics()
    counted = DispatchMetrics(metrics)
    counted.transferred(Transferred(10, transfer_s=2.0, overlapped_s=1.5, num_bytes=1000))
    counted.transferred(Transferred(0, transfer_s=0.0, overlapped_s=0.0, num_bytes=0))  # nothing was fetched
    text = metrics.render()[0].decode()
    for line in (
        "kvasir:dispatch_kv_blocks_total 10.0",
        "kvasir:dispatch_kv_bytes_total 1000.0",
        "kvasir:dispatch_kv_seconds_total 2.0",
        "kvasir:dispatch_kv_overlapped_seconds_total 1.5",
        "kvasir:dispatch_kv_overlapped_share_count 1.0",
        "kvasir:dispatch_kv_overlapped_share_sum 0.75",
    ):
        assert line in text, line
