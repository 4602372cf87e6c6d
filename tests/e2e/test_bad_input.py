"""What clients must not send: an error in OpenAI's shape, nothing reaches a node, and the next request is healthy."""

import json

import httpx
import pytest

from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

# (path, fields beside a good request's, the status wanted)
BAD: list[tuple[str, dict[str, object], int]] = [
    (COMPLETIONS, {"model": "another"}, 404),
    (COMPLETIONS, {"model": 7}, 400),
    (COMPLETIONS, {"prompt": ""}, 400),
    (COMPLETIONS, {"prompt": []}, 400),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400),
    (COMPLETIONS, {"prompt": [49152]}, 400),
    (COMPLETIONS, {"prompt": [-1]}, 400),
    (COMPLETIONS, {"prompt": [1.5]}, 400),
    (COMPLETIONS, {"prompt": [5] * 8193}, 400),
    (COMPLETIONS, {"temperature": -0.1}, 400),
    (COMPLETIONS, {"temperature": "hot"}, 400),
    (COMPLETIONS, {"temperature": 1e9}, 400),
    (COMPLETIONS, {"top_p": -0.1}, 400),
    (COMPLETIONS, {"top_p": 1.1}, 400),
    (COMPLETIONS, {"min_p": 2}, 400),
    (COMPLETIONS, {"top_k": -2}, 400),
    (COMPLETIONS, {"repetition_penalty": 0}, 400),
    (COMPLETIONS, {"presence_penalty": 3}, 400),
    (COMPLETIONS, {"max_tokens": 0}, 400),
    (COMPLETIONS, {"max_tokens": -5}, 400),
    (COMPLETIONS, {"max_tokens": 10**9}, 400),
    (COMPLETIONS, {"max_tokens": 2**70}, 400),
    (COMPLETIONS, {"n": 0}, 400),
    (COMPLETIONS, {"seed": "x"}, 400),
    (COMPLETIONS, {"logit_bias": {"191222": 5}}, 400),
    (COMPLETIONS, {"logit_bias": {"-1": 5}}, 400),
    (COMPLETIONS, {"logit_bias": {"AI": -100}}, 400),
    (COMPLETIONS, {"logit_bias": {"5": 1000}}, 400),
    (COMPLETIONS, {"logit_bias": {"5": None}}, 400),
    (COMPLETIONS, {"logit_bias": []}, 400),
    (COMPLETIONS, {"stop": 7}, 400),
    (COMPLETIONS, {"stop_token_ids": [-1]}, 400),
    (COMPLETIONS, {"suffix": "end"}, 400),
    (COMPLETIONS, {"cache_salt": ""}, 400),
    (COMPLETIONS, {"priority": "high"}, 400),
    (COMPLETIONS, {"logprobs": -1}, 400),
    (COMPLETIONS, {"stream": "yes please"}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": "hello"}, 400),
    (CHAT, {"messages": [{"role": "wizard", "content": "hello"}]}, 400),
    (CHAT, {"messages": [{"role": "user"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, 400),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400),
]

RAW: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'{"model": "m", "prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "hello"}', 400),
    (b'{"model": "%s", "prompt": "hello", "temperature": NaN}', 400),
    (b'{"model": "%s", "prompt": "hello", "temperature": Infinity}', 400),
    (b'{"model": "%s", "prompt": "hello", "top_p": 1e999}', 400),
    (b'{"a":' * 5000, 400),
]


@pytest.fixture(autouse=True)
def _nothing_reaches_a_node(cluster: Cluster) -> object:
    nodes = [*cluster.prefill, *cluster.decode]
    with cluster.deltas(nodes, "kvasir:requests_started_total") as rose:
        yield
    assert rose["kvasir:requests_started_total"] == 0


def check_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["type"]
    assert {"param", "code"} <= error.keys()


def test_bad_fields(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for path, fields, status in BAD:
            good = {"model": cluster.model, **({"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO})}
            response = client.post(path, json={**good, **fields})
            assert response.status_code == status, f"{fields}: {response.text}"
            check_error(response, status)


def test_bad_bodies(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for body, status in RAW:
            named = body.replace(b"%s", cluster.model.encode())
            check_error(client.post(COMPLETIONS, content=named, headers={"content-type": "application/json"}), status)


def test_bad_routes(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        check_error(client.get("/v1/nothing"), 404)
        check_error(client.get(COMPLETIONS), 405)
        check_error(client.post(COMPLETIONS, content=b" " * (40 << 20)), 413)


def test_long_text_is_refused_by_its_length(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for megabytes in (1, 5, 20):
            body = json.dumps({"model": cluster.model, "prompt": "word " * (megabytes * 200_000)})
            response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            check_error(response, 400)
            assert response.json()["error"]["code"] == "context_length_exceeded"
