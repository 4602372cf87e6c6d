"""Who sees which tenants' names in /metrics."""

import pytest

from kvasir.common.metrics import Metrics
from kvasir.router.metrics import RouterMetrics
from kvasir.router.tenants.tenant import Tenant
from kvasir.router.tenants.visible import visible_metrics

NAMES = ["search", "sup\\port", 'quo"ted', "two\nlines", "re\rturn", 'x",limit="y', "tenant"]


@pytest.fixture
def text() -> bytes:
    metrics = Metrics({"model_name": 'tenant="search"'})
    recorders = RouterMetrics(metrics)
    for name in NAMES:
        recorders.limited(tenant=name, limit="requests")
    return metrics.render()[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_tenant_sees_its_own_samples_and_those_that_name_nobody(text: bytes, name: str) -> None:
    shown = visible_metrics(text, Tenant(name))
    hidden = set(text.split(b"\n")) - set(shown.split(b"\n"))
    assert len(hidden) == len(NAMES) - 1
    assert all(line.startswith(b"kvasir:router_requests_limited_total{") for line in hidden)
    assert b"kvasir:router_requests_limited_total{" in shown
    assert b"vllm:num" in shown or b"kvasir:router_requests_in_flight{" in shown


def test_one_without_samples_sees_none_of_them_and_an_operator_all(text: bytes) -> None:
    assert b"router_requests_limited_total{" not in visible_metrics(text, Tenant("nobody"))
    assert visible_metrics(text, Tenant("nobody", is_operator=True)) == text
