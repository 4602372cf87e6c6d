"""After everything else that was sent to it, the cluster still answers; nulls are absent fields."""

import httpx
import pytest

from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OPTIONAL = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "user", "logprobs")


def test_null_is_the_same_as_absent(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        good = {"model": cluster.model, "prompt": "test"}
        nulls = client.post("/v1/completions", json={**good, **dict.fromkeys(OPTIONAL)})
        assert nulls.status_code == 200
        assert nulls.json()["usage"]["completion_tokens"] <= 16
        greedy = {**good, "temperature": 0}
        absent = client.post("/v1/completions", json=greedy).json()
        null = client.post("/v1/completions", json={**greedy, "max_tokens": None, "stop": None, "seed": None}).json()
        assert null["choices"][0]["text"] == absent["choices"][0]["text"]


def test_alive_and_ready(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        assert client.get("/version").json()["version"]
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [cluster.model]
