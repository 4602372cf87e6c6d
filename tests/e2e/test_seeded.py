"""Seeded sampling: the same tokens alone, in a batch, after preemption, in one process or two."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.e2e.test_parity import SMALL_CACHE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = list(range(100, 130))
CONSTRAINED = {"structured_outputs": {"regex": "([A-Z][a-z]{2,9} [0-9]+; )+"}}


def body(model: str, seed: int | None, max_tokens: int = 40) -> dict[str, object]:
    return {
        "model": model,
        "prompt": PROMPT,
        "seed": seed,
        "temperature": 0.8,
        "top_p": 0.95,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def sample(cluster: Cluster, seed: int | None, neighbours: int = 0, **more: object) -> list[int]:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=200) as client:
            others = [
                asyncio.create_task(client.post("/v1/completions", json=body(model, None, 20 + 10 * i)))
                for i in range(neighbours)
            ]
            response = await client.post("/v1/completions", json=body(model, seed) | more)
            for other in await asyncio.gather(*others):
                assert other.status_code == 200, other.text
            assert response.status_code == 200, response.text
            ids: list[int] = response.json()["choices"][0]["token_ids"]
            return ids

    model = cluster.model
    return asyncio.run(run())


def test_same_seed_same_tokens(cluster: Cluster, model_dir: Path) -> None:
    alone = sample(cluster, 42)
    assert len(alone) == 40
    assert sample(cluster, 42) == alone
    assert sample(cluster, 42, neighbours=1) == alone
    assert sample(cluster, 42, neighbours=7) == alone
    assert sample(cluster, 43) != alone
    assert sample(cluster, None) != sample(cluster, None), "without a seed, two calls differ"

    constrained = sample(cluster, 42, **CONSTRAINED)
    assert constrained != alone
    assert sample(cluster, 42, neighbours=3, **CONSTRAINED) == constrained

    with Cluster(model_dir, decode_args=SMALL_CACHE) as small:
        filler = {**body(small.model, None), "prompt": [7] * 600, "max_tokens": 150}

        async def under_pressure() -> list[int]:
            async with httpx.AsyncClient(base_url=small.url, timeout=250) as client:
                others = [asyncio.create_task(client.post("/v1/completions", json=filler)) for _ in range(3)]
                responses = await asyncio.gather(
                    *(client.post("/v1/completions", json=body(small.model, 42)) for _ in range(6)), *others
                )
                assert all(response.status_code == 200 for response in responses)
                ids = [response.json()["choices"][0]["token_ids"] for response in responses[:6]]
                assert all(other == ids[0] for other in ids)
                return list(ids[0])

        with small.deltas(small.decode, "vllm:num_preemptions_total") as rose:
            assert asyncio.run(under_pressure()) == alone
        assert rose["vllm:num_preemptions_total"] > 0

        assert small.prefill[0].terminate() == 0  # what is left is one process
        small.wait_ready()
        assert sample(small, 42) == alone
        assert sample(small, 42, **CONSTRAINED) == constrained
