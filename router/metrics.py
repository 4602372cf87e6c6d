"""What the router tells Prometheus about requests, end to end; what the dispatching half counts stands beside it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvasir.common.metrics import ITL_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS, TTFT_BUCKETS_S, Metrics, Sample
from kvasir.router.recent import Recent

Clock = Callable[[], float]

# How a request can end: what a model's own end or limit gives, and what else may happen.
OUTCOMES = ("stop", "length", "abort", "error", "invalid", "overloaded")
_FINISHED = OUTCOMES[:4]  # that vLLM counts
_ENDPOINTS = ("completions", "chat/completions", "responses")


class RouterMetrics:
    def __init__(self, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.recent = Recent(clock)
        self._num_in_flight = 0
        self.started = metrics.counter("kvasir:router_requests_started", "Generation requests received.", ["endpoint"])
        self.ended = metrics.counter(
            "kvasir:router_requests", "Generation requests that ended, by how.", ["endpoint", "outcome"]
        )
        self.success = metrics.counter("vllm:request_success", "Requests that ended, by how.", ["finished_reason"])
        self.started.show(endpoint=_ENDPOINTS)
        self.ended.show(endpoint=_ENDPOINTS, outcome=OUTCOMES)
        self.success.show(finished_reason=_FINISHED)
        self.in_flight = metrics.gauge("kvasir:router_requests_in_flight", "Generation requests that have not ended.")
        self.responses = metrics.counter("kvasir:router_http_responses", "HTTP responses, by status.", ["status"])
        self.unknown_fields = metrics.counter(
            "kvasir:router_unknown_fields", "Fields of request bodies that nobody knows, and that were ignored."
        )
        self.limited = metrics.counter(
            "kvasir:router_requests_limited", "Requests refused by a limit of their key.", ["tenant", "limit"]
        )
        self.limits_failures = metrics.counter(
            "kvasir:router_limits_failures", "Times that the Redis of the limits did not answer; nothing was limited."
        )
        self.streams_failures = metrics.counter(
            "kvasir:router_streams_failures", "Resumable streams that their Redis did not take note of, or give back."
        )
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens", "Prompt tokens of requests that gave a token.")
        self.cached_tokens = metrics.counter("vllm:prompt_tokens_cached", "Prompt tokens that no node had to compute.")
        self.num_generation_tokens = 0
        metrics.sampled(self._read)
        self.ttft_s = metrics.histogram(
            "vllm:time_to_first_token_seconds", "From the request's arrival to its first token.", TTFT_BUCKETS_S
        )
        self.itl_s = metrics.histogram(
            "vllm:inter_token_latency_seconds", "Gaps between the tokens of a choice.", ITL_BUCKETS_S
        )
        self.tpot_s = metrics.histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of one choice.", ITL_BUCKETS_S
        )
        self.e2e_s = metrics.histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS_S
        )
        self.request_prompt_tokens = metrics.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of one request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = metrics.histogram(
            "vllm:request_generation_tokens", "Generated tokens of one request.", TOKEN_BUCKETS
        )

    def begin(self, endpoint: str) -> "RequestRecord":
        self._change_in_flight(1)
        self.started(endpoint=endpoint)
        return RequestRecord(self, endpoint)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def _read(self) -> Iterator[Sample]:
        yield Sample("vllm:generation_tokens", "Generated tokens.", self.num_generation_tokens, is_counter=True)
        yield Sample("kvasir:router_processes", "Processes of this router that serve requests.", 1)  # workers add up

    def _change_in_flight(self, by: int) -> None:
        self._num_in_flight += by
        self.in_flight(self._num_in_flight)

    def end(self, endpoint: str, outcome: str) -> None:
        self._change_in_flight(-1)
        self.ended(endpoint=endpoint, outcome=outcome)
        if outcome in _FINISHED:
            self.success(finished_reason=outcome)


@dataclass(eq=False, slots=True)
class _Choice:
    first_s: float  # when its first token came
    last_s: float
    num_tokens: int


class RequestRecord:
    """One request's life. It ends exactly once, whatever happens first."""

    __slots__ = ("_arrived_s", "_choices", "_endpoint", "_has_ended", "_metrics")

    def __init__(self, metrics: RouterMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived_s = metrics.clock()
        self._choices: dict[int, _Choice] = {}
        self._has_ended = False

    def prompt(self, num_tokens: int) -> None:
        self._metrics.prompt_tokens(num_tokens)
        self._metrics.request_prompt_tokens(num_tokens)

    def cached(self, num_tokens: int) -> None:
        """Of one of its prompts."""
        self._metrics.cached_tokens(num_tokens)

    def tokens(self, choice: int, num_tokens: int) -> None:
        """Several that come at once share their gap."""
        if num_tokens == 0:
            return
        metrics = self._metrics
        now = metrics.clock()
        seen = self._choices.get(choice)
        gap_s = None
        if seen is None:
            if not self._choices:
                metrics.ttft_s(now - self._arrived_s)
                metrics.recent.first_token(now - self._arrived_s)
            self._choices[choice] = _Choice(now, now, num_tokens)
        else:
            gap_s = (now - seen.last_s) / num_tokens
            metrics.itl_s(gap_s, num_tokens)
            seen.last_s = now
            seen.num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens
        metrics.recent.tokens(num_tokens, gap_s, now)

    def served(self, response_id: str, node: str) -> None:
        """`node` gave tokens of the answer that the client knows by this id."""
        self._metrics.recent.served(response_id, node)

    def end(self, outcome: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.end(self._endpoint, outcome)
        if outcome not in ("stop", "length"):
            return
        self._metrics.e2e_s(self._metrics.clock() - self._arrived_s)
        self._metrics.request_generation_tokens(sum(seen.num_tokens for seen in self._choices.values()))
        for seen in self._choices.values():
            if seen.num_tokens > 1:
                self._metrics.tpot_s((seen.last_s - seen.first_s) / (seen.num_tokens - 1))
