"""Nodes of unequal sizes, and small ones: what fits nowhere is refused, what fits somewhere is answered."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import faulty
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.asker import COMPLETIONS, GREEDY, Asker, ask
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
BYTES_PER_BLOCK = 737_280
FETCHED = "kvasir:kv_blocks_fetched_total"
RECOMPUTED = "kvasir:prompt_tokens_recomputed_total"
COMPUTED = "kvasir:prompt_tokens_computed_total"
STARTED = "kvasir:requests_started_total"


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> dict[str, tuple[int, ...]]:
    return {prompt.name: prompt.token_ids for prompt in reference.prompts(model_dir)}


@pytest.fixture(scope="module")
def small_prefill(model_dir: Path) -> Iterator[Cluster]:
    """The prefill node takes less than the decode node, which keeps nothing, so that it fetches each time anew."""
    with Cluster(
        model_dir,
        "shared_storage",
        prefill_args=("--max-model-len", "256"),
        decode_args=("--no-enable-prefix-caching",),
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def small_decode(model_dir: Path) -> Iterator[Cluster]:
    """The decode node holds 1,024 tokens, and now and then a block comes late."""
    late = [{"kind": "delay", "block": block, "delay_s": 0.2} for block in range(2, 300, 8)]
    with Cluster(
        model_dir,
        "tests.faulty:FaultyTcp",
        decode_args=("--kv-cache-memory", str(64 * BYTES_PER_BLOCK)),
        environment={faulty.VARIABLE: json.dumps(late)},
    ) as cluster:
        yield cluster


def greedy_body(token_ids: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    body = {"prompt": list(token_ids), "max_tokens": reference.NUM_OUTPUT_TOKENS, "ignore_eos": True}
    return {**body, **GREEDY, **fields}


def check(answer: Any, name: str, num_prompt_tokens: int) -> None:
    assert answer["choices"][0]["token_ids"] == list(reference.answers()[name].token_ids), name
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens


def answer_of(cluster: Cluster, prompts: dict[str, tuple[int, ...]], name: str) -> None:
    """One prompt, and the answer that it must have."""
    answer = ask(cluster, lambda asker: asker.whole(**greedy_body(prompts[name])))
    check(answer, name, len(prompts[name]))


def two_tokens_after(cluster: Cluster, num_prompt_tokens: int) -> Any:
    return ask(cluster, lambda asker: asker.whole(prompt=[9] * num_prompt_tokens, max_tokens=2, ignore_eos=True))


def store_of(cluster: Cluster) -> Path:
    arguments = cluster.decode[0].arguments
    return Path(arguments[arguments.index("--kv-path") + 1])


def files_of_store(cluster: Cluster) -> set[Path]:
    return {path for path in store_of(cluster).rglob("*") if path.is_file()}


def test_a_prompt_beyond_the_prefill_node_is_computed_on_the_decode_node(
    small_prefill: Cluster, prompts: dict[str, tuple[int, ...]]
) -> None:
    """The prefill node's refusal once went unheard: an answer was made from an incomplete KV."""
    cluster = small_prefill
    for length, is_too_long in ((255, False), (256, True), (257, True)):
        with cluster.deltas(cluster.prefill, STARTED) as rose:
            answer = two_tokens_after(cluster, length)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, 2)
        assert rose[STARTED] == (0 if is_too_long else 1)
    with cluster.deltas(cluster.prefill, STARTED) as sent, cluster.deltas(cluster.decode, COMPUTED) as computed:
        answer_of(cluster, prompts, "511-tokens")
    assert sent[STARTED] == 0
    assert computed[COMPUTED] == 511


def test_damaged_files_of_the_store_are_computed_again_and_replaced(
    small_prefill: Cluster, prompts: dict[str, tuple[int, ...]]
) -> None:
    """A torn or spoilt file once stayed visible: later loads gave gibberish without an error."""
    cluster, name, num_blocks = small_prefill, "64-tokens", 4
    before = files_of_store(cluster)
    with cluster.deltas(cluster.decode, FETCHED, RECOMPUTED) as rose:
        answer_of(cluster, prompts, name)
    assert (rose[FETCHED], rose[RECOMPUTED]) == (num_blocks, 0)
    torn, spoilt, *others = files_of_store(cluster) - before
    assert len(others) == num_blocks - 2
    torn.write_bytes(torn.read_bytes()[:-1000])
    data = bytearray(spoilt.read_bytes())
    data[len(data) // 2] ^= 1
    spoilt.write_bytes(data)

    bad = [f'kvasir:kv_misses_total{{reason="{reason}"}}' for reason in ("truncated", "checksum")]
    with cluster.deltas(cluster.decode, FETCHED, RECOMPUTED, *bad) as rose:
        answer_of(cluster, prompts, name)
    assert [rose[miss] for miss in bad] == [2, 2], "each was read twice"
    assert (rose[FETCHED], rose[RECOMPUTED]) == (num_blocks - 2, 2 * BLOCK_SIZE)

    with cluster.deltas(cluster.decode, FETCHED, RECOMPUTED) as rose:
        answer_of(cluster, prompts, name)
    assert (rose[FETCHED], rose[RECOMPUTED]) == (num_blocks, 0), "the prefill node has stored them anew"


def test_a_prefill_node_that_cannot_hand_over_costs_computing_only(
    small_prefill: Cluster, prompts: dict[str, tuple[int, ...]]
) -> None:
    """The mount is gone: the decode node must not go on from what never came."""
    cluster, name = small_prefill, "200-tokens"
    store = store_of(cluster)
    away = store.with_name("away")
    store.rename(away)
    try:
        with (
            cluster.deltas(cluster.prefill, STARTED, "kvasir:kv_store_failures_total") as sent,
            cluster.deltas(cluster.decode, FETCHED, RECOMPUTED) as rose,
        ):
            answer_of(cluster, prompts, name)
    finally:
        away.rename(store)
    assert sent[STARTED] == 1
    assert sent["kvasir:kv_store_failures_total"] >= 1
    assert (rose[FETCHED], rose[RECOMPUTED]) == (0, 200)


def test_what_can_never_fit_the_cache_blocks_nobody(small_decode: Cluster) -> None:
    """Under the model's length but larger than the cache: once admitted to a queue, it stood at its head for ever."""
    model = small_decode.model

    async def script(asker: Asker) -> None:
        async with httpx.AsyncClient(base_url=small_decode.url, timeout=60) as client:
            too_long = client.post(COMPLETIONS, json={"model": model, "prompt": [9] * 1100, "max_tokens": 8})
            refused, outgrown, short = await asyncio.gather(
                too_long,
                asker.whole(prompt=[9] * 1000, max_tokens=200, ignore_eos=True),
                asker.whole(prompt="hi", max_tokens=4, ignore_eos=True),
            )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert outgrown["choices"][0]["finish_reason"] == "length"
        assert outgrown["usage"]["completion_tokens"] == 24
        assert short["usage"]["completion_tokens"] == 4

    with small_decode.deltas(small_decode.prefill, STARTED) as rose:
        ask(small_decode, script)
    assert rose[STARTED] == 2, "what can never fit reaches no node"


def test_slow_transfers_into_a_cache_that_is_too_small_for_all(
    small_decode: Cluster, prompts: dict[str, tuple[int, ...]]
) -> None:
    """Once all waited for blocks that the others held: running 0, waiting n, for ever."""
    names = ["140-tokens", "200-tokens", "140-tokens", "511-tokens"] * 3
    decode = small_decode.decode[0]
    total = decode.metrics()["kvasir:total_blocks"]
    assert total == 64

    async def script(asker: Asker) -> None:
        bodies = [greedy_body(prompts[name], cache_salt=str(i)) for i, name in enumerate(names)]
        for name, answer in zip(names, await asyncio.gather(*(asker.whole(**body) for body in bodies)), strict=True):
            check(answer, name, len(prompts[name]))

    with small_decode.deltas([decode], FETCHED) as rose:
        ask(small_decode, script)
    assert rose[FETCHED] >= 3 * (9 + 13 + 9 + 32)
    wait_until(lambda: decode.metrics()["kvasir:free_blocks"] == total, 60, "every block is free again")


def test_nodes_of_two_dtypes_pair_and_another_block_size_does_not(
    model_dir: Path, prompts: dict[str, tuple[int, ...]]
) -> None:
    """A bfloat16 decode node reads float32 blocks by their headers, and keeps none of them for others."""
    name, num_blocks = "64-tokens", 4
    inexact, cached = "kvasir:kv_blocks_inexact_total", "kvasir:kv_blocks_cached_total"
    with Cluster(model_dir, decode_args=("--dtype", "bfloat16")) as cluster:
        stranger = cluster.add_node("decode", ("--block-size", "32"))
        right = list(reference.answers()[name].token_ids)
        for _ in range(2):
            with cluster.deltas(cluster.decode[:1], FETCHED, inexact, cached, RECOMPUTED) as rose:
                answer = ask(cluster, lambda asker: asker.whole(**greedy_body(prompts[name], max_tokens=16)))
            ids = answer["choices"][0]["token_ids"]
            assert ids[0] == right[0], "the prefill node's own"
            assert sum(one == other for one, other in zip(ids, right, strict=False)) >= 8
            assert (rose[FETCHED], rose[inexact], rose[cached], rose[RECOMPUTED]) == (num_blocks, num_blocks, 0, 0)
        wait_until(lambda: "has block size 32" in stranger.log(), 60, "the router says why it does not take it")
        refusal = next(line for line in stranger.log().splitlines() if "has block size 32" in line)
        assert refusal.rstrip().endswith("has 16")
