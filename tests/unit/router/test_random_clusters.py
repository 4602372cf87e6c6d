"""What the default policy never does, in thousands of clusters made at random."""

import random
from collections import Counter
from collections.abc import Mapping

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.costs import LocalPrefill
from kvasir.router.policy import (
    Choice,
    Rules,
    choose,
    has_room_to_decode,
    has_room_to_prefill,
    prefix_aware,
)
from kvasir.router.views import Need, NodeView
from tests.unit.router.made_up import need, node


def test_it_never_chooses_a_node_without_room_and_never_waits_while_there_is_some() -> None:
    outcomes = Counter(outcome(random.Random(seed)) for seed in range(5000))
    assert min(outcomes[way] for way in ("waits", "remote", "alone", "cached", "short")) > 50, outcomes


def outcome(rng: random.Random) -> str:
    """Of one made-up case, checked."""
    prefill = [random_node(rng, f"p{i}") for i in range(rng.randrange(4))]
    decode = [random_node(rng, f"d{i}") for i in range(rng.randrange(4))]
    num_tokens = rng.choice([rng.randrange(1, 100), rng.randrange(1, 3000)])
    wants = need(num_tokens, crosses_tiers=rng.random() < 0.1, num_sequences=rng.choice([1, 1, 4]))
    shares = rng.choices([0, 0, num_tokens - 1, rng.randrange(num_tokens)], k=len(prefill) + len(decode))
    held = {one.address: share // 16 * 16 for one, share in zip((*prefill, *decode), shares, strict=True)}
    local = LocalPrefill(rng.choice([0, 64, 10_000]), rng.choice([0, 100]))
    choice = choose(wants, prefill, decode, Rules(prefix_aware, local), held.__getitem__)
    able = [one for one in decode if has_room_to_decode(one, wants)]
    if choice is None:
        waits_for = [one for one in prefill if not one.is_draining and one.connector in {d.connector for d in able}]
        assert not able or waits_for
        assert not able or not all(has_room_to_prefill(one) for one in waits_for)
        return "waits"
    assert choice.decode in able
    check_prefill(choice, wants, prefill, held, local)
    return choice.why_local or "remote"


def check_prefill(
    choice: Choice, wants: Need, prefill: list[NodeView], held: Mapping[str, int], local: LocalPrefill
) -> None:
    decoder = choice.decode
    num_uncached = wants.num_tokens - held[decoder.address]
    if choice.prefill is not None:
        assert choice.prefill in prefill
        assert has_room_to_prefill(choice.prefill)
        assert choice.prefill.connector == decoder.connector
        assert choice.why_local == ""
    elif choice.why_local == "alone":
        assert all(one.is_draining or one.connector != decoder.connector for one in prefill)
    elif choice.why_local == "cached":
        assert num_uncached <= local.max_uncached_tokens
        assert num_uncached <= held[decoder.address]
        assert not wants.crosses_tiers
    else:
        assert choice.why_local == "short"
        assert wants.num_tokens <= local.max_prompt_tokens
        assert not wants.crosses_tiers


def random_node(rng: random.Random, address: str) -> NodeView:
    return node(
        address,
        connector=rng.choice(["tcp", "tcp", "tcp", "redis"]),
        num_free_blocks=rng.choice([0, 10, 100, 1000]),
        num_seats_taken=rng.randrange(9),
        num_queued_tokens=rng.choice([0, 0, 100, 4095, 4096, 9000]),
        is_draining=rng.random() < 0.1,
        is_full=rng.random() < 0.1,
        prefill_speed=rng.choice([None, PrefillSpeed(0.001), PrefillSpeed(0.0001, 0.000001)]),
        decode_step_s=rng.choice([0.0, 0.02]),
        block_fetch_s=rng.choice([0.0, 0.001, 0.1]),
    )
