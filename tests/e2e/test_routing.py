"""Where the default policy sends what is asked for again, through real processes: to the nodes that hold its prefix."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.e2e.asker import GREEDY, Asker, ask
from tests.service import Service
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
NUM_CONVERSATIONS = 8
FIRST, ANSWER, NEXT = 160, 16, 16  # tokens: the first prompt, each answer, what is added in each further turn
COMPUTED = "kvasir:prompt_tokens_computed_total"
CACHED = "kvasir:kv_blocks_cached_total"
LOCAL = 'kvasir:local_prefills_total{reason="cached"}'


@pytest.fixture
def pairs(model_dir: Path) -> Iterator[Cluster]:
    """Two of each; a decode node may compute what is left of a prompt that it holds, but for one block."""
    options = ("--max-local-prefill-tokens", str(BLOCK_SIZE))
    with Cluster(model_dir, "tcp", num_prefill=2, num_decode=2, router_args=options) as cluster:
        yield cluster


def new_tokens(number: int, count: int) -> list[int]:
    return random.Random(f"{number}/{count}").choices(range(1000, 20000), k=count)


async def turn(asker: Asker, token_ids: Sequence[int], salt: str = "routing") -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's nobody computed."""
    body: dict[str, Any] = {"prompt": list(token_ids), "max_tokens": ANSWER, "ignore_eos": True, "cache_salt": salt}
    whole = await asker.whole(**GREEDY, **body)
    return whole["choices"][0]["token_ids"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


def computed_by(nodes: Sequence[Service]) -> list[float]:
    return [node.metrics()[COMPUTED] for node in nodes]


def wait_until_known(cluster: Cluster, num_tokens: int) -> None:
    """The router knows all full blocks of prompts of so many tokens, on both tiers."""
    num_blocks = 2 * NUM_CONVERSATIONS * (num_tokens // BLOCK_SIZE)
    known = "kvasir:prefix_index_blocks"
    wait_until(lambda: cluster.router.metrics()[known] >= num_blocks, 60, "what nodes hold is known to the router")


def test_turns_stay_where_their_prefix_is_and_conversations_spread(pairs: Cluster) -> None:
    conversations = [new_tokens(number, FIRST) for number in range(NUM_CONVERSATIONS)]
    before = [computed_by(nodes) for nodes in (pairs.prefill, pairs.decode)]

    async def first_turns(asker: Asker) -> None:
        answers = await asyncio.gather(*(turn(asker, prompt) for prompt in conversations))
        for number, (answer, num_cached) in enumerate(answers):
            assert num_cached == 0
            conversations[number] += [*answer, *new_tokens(number, NEXT)]

    ask(pairs, first_turns)
    shares = [now - then for now, then in zip(computed_by(pairs.prefill), before[0], strict=True)]
    assert sum(shares) == NUM_CONVERSATIONS * FIRST
    assert min(shares) > 0, "both prefill nodes have had some of it"
    assert computed_by(pairs.decode) == before[1], "and the tiers were kept apart"
    wait_until_known(pairs, FIRST)

    homes: dict[int, Service] = {}
    answers: dict[int, list[int]] = {}

    async def second_turns(asker: Asker) -> None:
        for number, prompt in enumerate(conversations):
            then = computed_by(pairs.prefill)
            answers[number], num_cached = await turn(asker, prompt)
            assert num_cached == FIRST, f"conversation {number} moved away from its prefix"
            rose = [now - past for now, past in zip(computed_by(pairs.prefill), then, strict=True)]
            assert sorted(rose) == [0, ANSWER + NEXT]
            homes[number] = pairs.prefill[rose.index(ANSWER + NEXT)]

    with pairs.deltas(pairs.decode, CACHED) as cached:
        ask(pairs, second_turns)
    # The answer's last token was never computed, so a block of it has no hash.
    assert cached[CACHED] == NUM_CONVERSATIONS * ((FIRST + ANSWER - 1) // BLOCK_SIZE), "decode nodes fetched the rest"
    assert len(set(homes.values())) == 2
    check_local_prefill(pairs, conversations, answers)
    check_loss(pairs, homes[1], [*conversations[1], *answers[1], *new_tokens(1, 2 * NEXT)])


def check_local_prefill(
    cluster: Cluster, conversations: Sequence[Sequence[int]], expected: dict[int, list[int]]
) -> None:
    """Asked again, each lacks no more than its last block: the decode node that holds it computes that itself, unless
    the speeds that were measured say that the trip is faster. The answer is the same."""
    wait_until_known(cluster, FIRST + ANSWER + NEXT)
    assert cluster.router.metrics()[LOCAL] == 0
    num_local = 0.0
    for number, prompt in enumerate(conversations):
        with cluster.deltas(cluster.prefill, COMPUTED) as elsewhere:
            answer, num_cached = ask(cluster, lambda asker, prompt=prompt: turn(asker, prompt))
        assert answer == expected[number]
        assert num_cached == len(prompt) - BLOCK_SIZE
        is_local = elsewhere[COMPUTED] == 0
        assert is_local or elsewhere[COMPUTED] == BLOCK_SIZE
        num_local += is_local
        assert cluster.router.metrics()[LOCAL] == num_local


def check_loss(cluster: Cluster, home: Service, prompt: Sequence[int]) -> None:
    """The node that holds it is killed: another one computes it, and says the same."""
    expected, num_cached = ask(cluster, lambda asker: turn(asker, prompt, salt="as if it were new"))
    assert num_cached == 0
    other = next(node for node in cluster.prefill if node is not home)
    home.kill()
    wait_until(lambda: cluster.router.metrics()['kvasir:nodes{role="prefill"}'] == 1, 60, "its loss is noticed")
    cluster.wait_ready()  # a canary goes through who is left, and its tokens are no part of what is counted
    with cluster.deltas([other], COMPUTED) as rose:
        answer, num_cached = ask(cluster, lambda asker: turn(asker, prompt))
    assert answer == expected
    assert (num_cached, rose[COMPUTED]) == (0, len(prompt))
