"""Each request is counted once, under how it ended; times are those of its tokens."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvasir.common.errors import NodeUnavailable, Overloaded
from kvasir.common.metrics import Metrics
from kvasir.router.metrics import RouterMetrics
from kvasir.router.types import RoutedRequest, TokenDelta
from tests.fake_dispatcher import play
from tests.unit.router.openai.conftest import ids, running_router


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_times_are_measured_at_the_tokens() -> None:
    metrics = Metrics()
    now = 10.0
    router_metrics = RouterMetrics(metrics, clock=lambda: now)
    record = router_metrics.begin("completions")
    assert value(metrics, "kvasir:router_requests_in_flight") == 1
    for now, num_tokens in ((10.5, 1), (10.6, 1), (10.8, 2)):  # noqa: B007, the clock reads it
        record.tokens(0, num_tokens)
    record.end("length")
    record.end("abort")
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 3
    assert round(value(metrics, "vllm:inter_token_latency_seconds_sum"), 6) == 0.3
    assert round(value(metrics, "vllm:request_time_per_output_token_seconds_sum"), 6) == 0.1
    assert round(value(metrics, "vllm:e2e_request_latency_seconds_sum"), 6) == 0.8
    assert value(metrics, "vllm:generation_tokens_total") == 4
    assert value(metrics, "kvasir:router_processes") == 1
    assert value(metrics, "kvasir:router_requests_total", endpoint="completions", outcome="length") == 1
    assert value(metrics, "kvasir:router_requests_in_flight") == 0


async def test_sums_by_reason_are_exact() -> None:
    def script(request: RoutedRequest) -> list[Any]:
        kind = chr(request.prompt_token_ids[-1] + ord("!"))  # the byte alphabet begins with '!'
        if kind == "e":
            return [TokenDelta(sequence=0, token_ids=tuple(ids("a"))), NodeUnavailable("gone")]
        return [Overloaded("full")] if kind == "o" else list(play(ids("abc"), request))

    async with running_router(script) as router:
        for _ in range(3):
            await router.complete(prompt="s", stop="c")
            await router.complete(prompt="l", max_tokens=2, stream=True)
            await router.complete(prompt="e", stream=True)
            await router.complete(prompt="o")
            await router.complete(temperature=-1)
        name = 'kvasir:router_requests_total{endpoint="completions",model_name="m",outcome='
        for outcome in ("stop", "length", "error", "overloaded", "invalid"):
            assert await router.metric(f'{name}"{outcome}"') == 3, outcome
        assert await router.metric("kvasir:router_requests_started_total") == 15
        assert await router.metric("kvasir:router_requests_in_flight") == 0
        assert await router.metric("vllm:time_to_first_token_seconds_count") == 9
        assert await router.metric("vllm:request_success_total") == 9
        text = (await router.http.get("/metrics")).text
    families = [one for one in text_string_to_metric_families(text) if one.name.startswith("vllm:")]
    assert {"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"} <= {one.name for one in families}
    still = {one.name for one in families if not any(sample.value for sample in one.samples)}
    assert still == {"vllm:prompt_tokens_cached"}, "none were"
