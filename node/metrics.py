"""A node's metrics: vLLM's names where it has one, since dashboards depend on them, and ours beside them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvasir.common.metrics import ITL_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS, TTFT_BUCKETS_S, Metrics
from kvasir.engine.stats import StepMetrics
from kvasir.engine.step import Admitted, SequenceOutput

_BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


@dataclass(eq=False, slots=True)
class Progress:
    """When what of a request came, on the monotonic clock."""

    arrival_s: float
    num_prompt_tokens: int
    num_generated: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class NodeMetrics:
    """Told of what happens to requests; nothing of it raises."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = metrics
        self._clock = clock
        counter, histogram = metrics.counter, metrics.histogram
        self._started = counter("kvasir:requests_started", "Requests accepted by this node.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests admitted.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated on this node.")
        self._finished = counter("vllm:request_success", "Requests that came to their end.", ["finished_reason"])
        self._failed = counter("kvasir:request_failures", "Requests that failed, by error.", ["error"])
        self.blocks_cached = counter("kvasir:kv_blocks_cached", "Blocks of tickets that were here already.")
        self.tokens_recomputed = counter(
            "kvasir:prompt_tokens_recomputed", "Prompt tokens computed here since their blocks did not come."
        )
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival here to first token.", TTFT_BUCKETS_S)
        self._itl = histogram("vllm:inter_token_latency_seconds", "From one token to the next.", ITL_BUCKETS_S)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap between a request's tokens.", ITL_BUCKETS_S
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival here to last token.", LATENCY_BUCKETS_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival here to admission.", LATENCY_BUCKETS_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Admission to first token.", LATENCY_BUCKETS_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", LATENCY_BUCKETS_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._max_tokens = histogram("vllm:request_max_num_generation_tokens", "What was asked for.", TOKEN_BUCKETS)
        self._generation = histogram("vllm:request_generation_tokens", "Tokens of a request.", TOKEN_BUCKETS)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of one engine step.", TOKEN_BUCKETS)
        self._step_time = histogram("kvasir:step_time_seconds", "One engine step.", ITL_BUCKETS_S)
        self._batch = histogram("kvasir:step_batch_size", "Requests of one engine step.", _BATCH_BUCKETS)

    def started(self, progress: Progress, max_tokens: int) -> None:
        self._started()
        self._max_tokens(max_tokens)
        self._prompt(progress.num_prompt_tokens)

    def admitted(self, sequences: Iterable[Progress], admitted: Admitted) -> None:
        for progress in sequences:
            progress.admitted_s = self._clock()
        self._queue(admitted.queue_s)
        self._prompt_tokens(len(admitted.request.prompt_token_ids))

    def generated(self, progress: Progress, output: SequenceOutput) -> None:
        """Some tokens of one step: they arrive together, so their gap is shared among them."""
        now = self._clock()
        num_tokens = len(output.token_ids)
        if num_tokens == 0:
            return
        self._generation_tokens(num_tokens)
        progress.num_generated += num_tokens
        if progress.last_token_s is None:
            progress.first_token_s = now
            self._ttft(now - progress.arrival_s)
            self._prefill(now - (progress.admitted_s or progress.arrival_s))
        else:
            self._itl((now - progress.last_token_s) / num_tokens, num_tokens)
        progress.last_token_s = now

    def finished(self, progress: Progress, reason: str) -> None:
        self._finished(finished_reason=reason)
        self._generation(progress.num_generated)
        self._e2e(self._clock() - progress.arrival_s)
        if progress.first_token_s is not None and progress.last_token_s is not None and progress.num_generated > 1:
            decode_s = progress.last_token_s - progress.first_token_s
            self._decode(decode_s)
            self._tpot(decode_s / (progress.num_generated - 1))

    def cancelled(self) -> None:
        """By its router, or since that is gone."""
        self._finished(finished_reason="abort")

    def failed(self, error: Exception) -> None:
        self._failed(error=type(error).__name__)

    def stepped(self, step: StepMetrics) -> None:
        """Called on the engine's thread."""
        if step.num_seqs:
            self._step_tokens(step.num_prefill_tokens + step.num_decode_tokens)
            self._step_time(step.step_time_s)
            self._batch(step.num_seqs)
