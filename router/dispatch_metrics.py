"""What the dispatching half counts; everything a client waits for, seen from the router."""

from collections.abc import Callable, Iterator

from kvasir.common.metrics import ITL_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS, TTFT_BUCKETS_S, Metrics, Sample
from kvasir.router.life import Life, Mark
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool


class DispatchMetrics:
    def __init__(self, metrics: Metrics) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        self.attempts = counter("kvasir:dispatch_attempts", "Attempts, by where the prompt is computed.", ["prefill"])
        self.retries = counter("kvasir:dispatch_retries", "What made a request try again.", ["reason"])
        self.nodes_joined = counter("kvasir:nodes_joined", "Nodes that joined.", ["role"])
        self.nodes_lost = counter("kvasir:nodes_lost", "Sessions with nodes that ended.", ["role"])
        self.canaries = counter("kvasir:canaries", "Canary generations, by result.", ["result"])
        self._finished = counter("vllm:request_success", "Requests that ended, by how.", ["finished_reason"])
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens sent to clients.")
        self._num_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", TOKEN_BUCKETS)
        self._num_generated = histogram("vllm:request_generation_tokens", "Generated tokens a request.", TOKEN_BUCKETS)
        self._ttft_s = histogram("vllm:time_to_first_token_seconds", "Received to first token.", TTFT_BUCKETS_S)
        self._itl_s = histogram("vllm:inter_token_latency_seconds", "Between two deliveries of tokens.", ITL_BUCKETS_S)
        self._e2e_s = histogram("vllm:e2e_request_latency_seconds", "Received to finished.", LATENCY_BUCKETS_S)
        self._queue_s = histogram("vllm:request_queue_time_seconds", "Received to dispatched.", LATENCY_BUCKETS_S)
        self._prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "Dispatched to first token.", LATENCY_BUCKETS_S
        )
        self._second_s = histogram(
            "kvasir:request_second_token_seconds", "First token to the first one of the decode node.", ITL_BUCKETS_S
        )
        self._decode_s = histogram("vllm:request_decode_time_seconds", "First token to finished.", LATENCY_BUCKETS_S)

    def delivered(self, num_tokens: int, since_last_s: float | None) -> None:
        self._generation_tokens(num_tokens)
        if since_last_s is not None:
            self._itl_s(since_last_s)

    def finished(self, life: Life, reason: str) -> None:
        """Once for each request that got in, however it ended."""
        self._finished(finished_reason=reason)
        self._prompt_tokens(len(life.request.prompt_token_ids))
        self._num_prompt_tokens(len(life.request.prompt_token_ids))
        self._num_generated(len(life.output_token_ids))
        for record, start, end in (
            (self._queue_s, Mark.RECEIVED, Mark.DISPATCHED),
            (self._ttft_s, Mark.RECEIVED, Mark.FIRST_TOKEN),
            (self._prefill_s, Mark.DISPATCHED, Mark.FIRST_TOKEN),
            (self._second_s, Mark.FIRST_TOKEN, Mark.DECODE_START),
            (self._decode_s, Mark.FIRST_TOKEN, Mark.FINISHED),
            (self._e2e_s, Mark.RECEIVED, Mark.FINISHED),
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

    metrics.sampled(read)
