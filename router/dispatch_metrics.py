"""What the dispatching half counts: attempts, nodes, and the phases of a request. What a client sees of a request, from
end to end, is in `metrics.py`."""

from collections.abc import Callable, Iterator

from kvasir.common.metrics import ITL_BUCKETS_S, LATENCY_BUCKETS_S, Metrics, Sample
from kvasir.router.life import Life, Mark
from kvasir.router.node_events import Transferred
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool, Reservation

_SHARE_BUCKETS = tuple(step / 10 for step in range(11))


class DispatchMetrics:
    def __init__(self, metrics: Metrics) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        self.attempts = counter("kvasir:dispatch_attempts", "Attempts, by where the prompt is computed.", ["prefill"])
        self.local_prefills = counter(
            "kvasir:local_prefills", "Prompts that a decode node prefills for itself, by why.", ["reason"]
        )
        self._expected = counter(
            "kvasir:prefix_expected_tokens", "Tokens that nodes were taken to have cached, when chosen.", ["role"]
        )
        self._cached = counter("kvasir:prefix_cached_tokens", "Tokens that they then had cached.", ["role"])
        self.retries = counter("kvasir:dispatch_retries", "What made a request try again.", ["reason"])
        self.nodes_joined = counter("kvasir:nodes_joined", "Nodes that joined.", ["role"])
        self.nodes_lost = counter("kvasir:nodes_lost", "Sessions with nodes that ended.", ["role"])
        self.canaries = counter("kvasir:canaries", "Canary generations, by result.", ["result"])
        self._finished = counter("kvasir:dispatch_requests", "Sequences that left the dispatcher, by how.", ["outcome"])
        self.attempts.show(prefill=("remote", "local"))
        self.local_prefills.show(reason=("alone", "cached", "short"))
        for by_role in (self._expected, self._cached, self.nodes_joined, self.nodes_lost):
            by_role.show(role=[role.value for role in Role])
        self.canaries.show(result=("ok", "failed", "full"))
        self._finished.show(outcome=("stop", "length", "abort"))
        self.num_tokens = 0  # that nodes gave
        metrics.sampled(self._read)
        self._kv_blocks = counter("kvasir:dispatch_kv_blocks", "Blocks that decode nodes took over.")
        self._kv_bytes = counter("kvasir:dispatch_kv_bytes", "Their bytes, as they travelled.")
        self._kv_s = counter("kvasir:dispatch_kv_seconds", "Time in which they were being fetched.")
        self._kv_overlapped_s = counter("kvasir:dispatch_kv_overlapped_seconds", "The part of it beside the prefill.")
        self._kv_share = histogram(
            "kvasir:dispatch_kv_overlapped_share",
            "Of one transfer's time, the part beside the prefill.",
            _SHARE_BUCKETS,
        )
        self._queue_s = histogram("vllm:request_queue_time_seconds", "Received to dispatched.", LATENCY_BUCKETS_S)
        self._prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "Dispatched to first token.", LATENCY_BUCKETS_S
        )
        self._second_s = histogram(
            "kvasir:request_second_token_seconds", "First token to the first one of the decode node.", ITL_BUCKETS_S
        )
        self._decode_s = histogram("vllm:request_decode_time_seconds", "First token to finished.", LATENCY_BUCKETS_S)

    def _read(self) -> Iterator[Sample]:
        help_text = "Tokens that nodes gave; the canary's and cut off ones too."
        yield Sample("kvasir:dispatch_tokens", help_text, self.num_tokens, is_counter=True)

    def admitted(self, reservation: Reservation, num_cached_tokens: int) -> None:
        """A node has begun with a request, and found so many of its tokens in its prefix cache."""
        role = reservation.node.info.role.value
        self._expected(reservation.num_expected_tokens, role=role)
        self._cached(num_cached_tokens, role=role)

    def transferred(self, transfer: Transferred) -> None:
        """A decode node has what it will get of a ticket."""
        self._kv_blocks(transfer.num_blocks_fetched)
        self._kv_bytes(transfer.num_bytes)
        self._kv_s(transfer.transfer_s)
        self._kv_overlapped_s(transfer.overlapped_s)
        if transfer.transfer_s > 0:
            self._kv_share(min(1.0, transfer.overlapped_s / transfer.transfer_s))

    def finished(self, life: Life, outcome: str) -> None:
        """Once for each request that got in, however it ended; `outcome` is that of sequences which have not."""
        for sequence, own in enumerate(life.outcomes):
            if own is not None or sequence in life.open:
                self._finished(outcome=own or outcome)
        for record, start, end in (
            (self._queue_s, Mark.RECEIVED, Mark.DISPATCHED),
            (self._prefill_s, Mark.DISPATCHED, Mark.FIRST_TOKEN),
            (self._second_s, Mark.FIRST_TOKEN, Mark.DECODE_START),
            (self._decode_s, Mark.FIRST_TOKEN, Mark.FINISHED),
        ):
            elapsed_s = life.between_s(start, end)
            if elapsed_s is not None:
                record(elapsed_s)


def watch_pool(
    metrics: Metrics, pool: NodePool, num_waiting: Callable[[], int], num_running: Callable[[], int]
) -> None:
    """What can be read off at any time is read when somebody asks."""

    def read() -> Iterator[Sample]:
        yield Sample("vllm:num_requests_waiting", "Requests in the router's queue.", num_waiting())
        yield Sample("vllm:num_requests_running", "Requests at nodes.", num_running())
        for role in Role:
            num_nodes = len(pool.nodes(role))
            yield Sample("kvasir:nodes", "Nodes with a live session.", num_nodes, {"role": role.value})
        for node in pool.nodes():
            view = node.view()
            labels = {"role": node.info.role.value, "address": node.info.address}
            yield Sample("kvasir:node_free_blocks", "By its last report and ours since.", view.num_free_blocks, labels)
            yield Sample("kvasir:node_seats_taken", "Requests there.", view.num_seats_taken, labels)
            yield Sample("kvasir:node_queued_tokens", "Prompt tokens to compute.", view.num_queued_tokens, labels)
            yield Sample("kvasir:prefix_index_blocks", "Blocks it is known to hold.", len(node.held), labels)

    metrics.sampled(read)
