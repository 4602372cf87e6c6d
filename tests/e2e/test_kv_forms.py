"""Answers written back, packed blocks, lossy blocks: real nodes, answers equal or nearly so."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.asker import GREEDY, ask
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
BYTES_PER_BLOCK = 737_280
FETCHED = "kvasir:kv_blocks_fetched_total"
BYTES = "kvasir:kv_bytes_fetched_total"
INEXACT = "kvasir:kv_blocks_inexact_total"
CACHED = "kvasir:kv_blocks_cached_total"
COMPUTED = "kvasir:prompt_tokens_computed_total"
RECOMPUTED = "kvasir:prompt_tokens_recomputed_total"
STORED = "kvasir:kv_blocks_stored_total"


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> dict[str, tuple[int, ...]]:
    return {prompt.name: prompt.token_ids for prompt in reference.prompts(model_dir)}


def answer_to(cluster: Cluster, prompt: Sequence[int], num_tokens: int = reference.NUM_OUTPUT_TOKENS) -> list[int]:
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, **GREEDY}
    ids: list[int] = ask(cluster, lambda asker: asker.whole(**body))["choices"][0]["token_ids"]
    return ids


@pytest.mark.full
def test_the_next_turn_of_a_chat_is_found_in_the_store(model_dir: Path, prompts: dict[str, tuple[int, ...]]) -> None:
    """By prefill nodes that keep nothing themselves: so by any. All blocks are packed without loss on their way."""
    keeps_nothing = ("--kv-codec", "lossless", "--no-enable-prefix-caching")
    with Cluster(
        model_dir,
        "shared_storage",
        num_prefill=2,
        prefill_args=keeps_nothing,
        decode_args=("--kv-codec", "lossless", "--kv-write-back"),
    ) as cluster:
        prompt = prompts["100-tokens"]
        with cluster.deltas(cluster.decode, FETCHED, BYTES, INEXACT) as rose:
            answer = answer_to(cluster, prompt)
        assert answer == list(reference.answers()["100-tokens"].token_ids)
        assert (rose[FETCHED], rose[INEXACT]) == (7, 0)
        assert rose[BYTES] < 7 * BYTES_PER_BLOCK
        num_filled = (len(prompt) + len(answer) - 1) // BLOCK_SIZE
        num_own = num_filled - len(prompt) // BLOCK_SIZE
        wait_until(lambda: cluster.total(cluster.decode, STORED) >= num_own, 60, "the answer's blocks are stored")

        turn = [*prompt, *answer, *prompts["15-tokens"]]
        with cluster.deltas(cluster.prefill, COMPUTED, FETCHED) as rose:
            first = answer_to(cluster, turn, 8)
        assert rose[FETCHED] == num_filled
        assert rose[COMPUTED] == len(turn) - num_filled * BLOCK_SIZE, "its own tokens, and the answer's last ones"
        assert answer_to(cluster, turn, 8) == first


@pytest.mark.full
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_lossy_blocks_serve_one_request(model_dir: Path, prompts: dict[str, tuple[int, ...]], codec: str) -> None:
    """The answer is near, and nothing of it is kept for others."""
    with Cluster(model_dir, prefill_args=("--kv-codec", codec)) as cluster:
        name, num_blocks = "64-tokens", 4
        right = list(reference.answers()[name].token_ids)
        for _ in range(2):
            with cluster.deltas(cluster.decode, FETCHED, BYTES, INEXACT, CACHED, RECOMPUTED) as rose:
                answer = answer_to(cluster, prompts[name], 16)
            assert answer[0] == right[0], "the prefill node's own"
            assert sum(one == other for one, other in zip(answer, right, strict=False)) >= 8
            assert (rose[FETCHED], rose[INEXACT], rose[CACHED], rose[RECOMPUTED]) == (num_blocks, num_blocks, 0, 0)
            assert rose[BYTES] < 0.3 * num_blocks * BYTES_PER_BLOCK
