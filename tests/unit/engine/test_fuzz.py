"""Random workloads with all that an engine can be asked for: every block is accounted for, nobody waits for ever, and
the output is what it is alone.

FUZZ_EXAMPLES=5000 looks for new cases; without it, the same cases are run each time.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.engine.limits import Limits
from kvasir.engine.sampling_params import SamplingParams
from tests.unit.engine.script import Rule, Script
from tests.unit.engine.world import Surroundings, World

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
SMALL = st.integers(0, 6)
OFTEN_NOT = st.sampled_from([False, False, True])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows are short: to wake a second thread for them takes longer than to choose."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    return Limits(
        block_size=draw(st.sampled_from([1, 2, 4, 5])),
        num_blocks=draw(st.integers(2, 16)),
        max_num_batched_tokens=draw(st.sampled_from([64, 8, 3, 2, 1])),
        max_num_seqs=draw(st.sampled_from([6, 3, 2, 1])),
        max_model_len=draw(st.sampled_from([20, 1000])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 5])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3, 0.95])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        priority_aging_s=draw(st.sampled_from([0.0, 3.0])),
        max_num_partial_prefills=draw(st.sampled_from([0, 0, 1, 2])),
        max_long_partial_prefills=draw(st.sampled_from([0, 0, 1])),
        target_itl_s=draw(st.sampled_from([0.0, 0.0, 0.1, 2.0])),
    )


@st.composite
def some_surroundings(draw: st.DrawFn) -> Surroundings:
    return Surroundings(
        num_host_blocks=draw(st.sampled_from([0, 2, 5, 40])),
        copy_s=draw(st.sampled_from([0.0, 0.3, 100.0])),
        fetch_s=draw(st.sampled_from([None, 0.0, 0.3, 100.0])),
        num_drafts=draw(st.sampled_from([0, 0, 1, 3, 9])),
    )


@st.composite
def some_wants(draw: st.DrawFn) -> SamplingParams:
    """Nothing of all this most often, and else several things at once."""
    if draw(st.booleans()):
        return SamplingParams(temperature=draw(st.sampled_from([0.0, 1.0])))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.6, 2.0])),
        logit_bias=draw(st.sampled_from([(), ((5, 9.0), (17, 6.0)), ((3, -100.0),)])),
        min_tokens=draw(st.sampled_from([0, 0, 5])),
        allowed_token_ids=draw(st.sampled_from([(), (), tuple(range(90))])),
        bad_words=draw(st.sampled_from([(), ((6,), (5, 5))])),
        logprobs=draw(st.sampled_from([None] * 6 + [0, 2])),
    )


@st.composite
def some_script(draw: st.DrawFn, limits: Limits) -> Script:
    """Any request that fits an empty cache. Prompts share prefixes often."""
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size + 1) - 1
    num_tokens = draw(st.integers(1, longest) | st.integers(min(4, longest), min(12, longest)))
    num_shared = draw(st.integers(0, num_tokens))
    forks = draw(st.sampled_from([()] * 6 + [(None,), (None, None), (None, 3), (2, None, 6)]))
    num_moved = 0 if forks else draw(st.integers(0, min(3, num_tokens - 1)))
    tail = draw(st.integers(1, 3))
    prompt = tuple([5] * num_shared + [tail] * (num_tokens - num_shared))[: num_tokens - num_moved]
    kind = draw(st.sampled_from(["plain", "plain", "decode", "decode", "hand_off", "store", "alone"]))
    num_blocks = -(-num_tokens // limits.block_size)
    wants = draw(some_wants())
    if kind in ("plain", "hand_off") and draw(OFTEN_NOT):
        wants = replace(wants, prompt_logprobs=0)
    rule = Rule(num_moved + draw(st.integers(1, 40)), num_moved + draw(st.sampled_from([2, 9, 50, 50, 50])))
    return Script(
        prompt=prompt,
        max_tokens=num_moved + draw(st.sampled_from([12, 30, 40]) | st.integers(1, 20)),
        arrival=draw(st.integers(0, 8)),
        priority=draw(st.integers(-1, 1)),
        seed=draw(st.integers(0, 2)),
        stops=draw(OFTEN_NOT),
        wants=wants,
        rule=rule if draw(OFTEN_NOT) else None,
        rule_delay=draw(SMALL),
        breaks_after=draw(st.sampled_from([None] * 15 + [num_moved, num_moved + 4])),
        salt=draw(st.sampled_from(["", "", "pepper"])),
        num_moved_tokens=num_moved,
        hand_off=kind in ("hand_off", "store"),
        reports_filled=kind in ("plain", "decode", "alone") and draw(OFTEN_NOT),
        loads=kind in ("store", "decode"),
        lost_blocks=frozenset(draw(st.sets(st.integers(0, num_blocks - 1)))),
        inexact_blocks=frozenset(draw(st.sets(st.integers(0, num_blocks - 1)) if draw(OFTEN_NOT) else st.just(()))),
        blocks_per_tick=draw(st.integers(1, 4)),
        load_delay=draw(SMALL),
        continue_at=draw(SMALL) if kind in ("decode", "alone") else None,
        num_first_tokens=draw(st.sampled_from([1, 1, 0, 2])),
        cancel_after=draw(st.sampled_from([None] * 30 + list(range(20)))),
        release_delay=draw(SMALL),
        forks=forks,
        is_stored=kind == "decode" and draw(st.booleans()),
    )


@st.composite
def some_world(draw: st.DrawFn) -> tuple[Limits, list[Script], Surroundings]:
    limits = draw(some_limits())
    return limits, draw(st.lists(some_script(limits), min_size=2, max_size=8)), draw(some_surroundings())


@settings(
    max_examples=int(EXAMPLES or 150),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(some_world())
def test_any_workload(world: tuple[Limits, list[Script], Surroundings]) -> None:
    World(*world).run()


def roomy(**changes: object) -> Limits:
    limits = Limits(block_size=4, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=6, max_model_len=1000)
    return replace(limits, **changes)


def test_slow_transfers_under_cache_pressure() -> None:
    """Room for two, twelve at once, all waiting for blocks from elsewhere: a state with running = 0 and waiting > 0
    that nothing ends used to be reached when the one ahead held nothing and those behind held what it needed."""
    scripts = [
        Script((i,) * (11 + i % 3), 20, loads=True, continue_at=3, load_delay=5, lost_blocks=frozenset({i % 3}))
        for i in range(12)
    ]
    world = World(roomy(num_blocks=14, max_num_seqs=12), scripts)
    world.run()
    assert world.engine.stats().num_preemptions > 0


def test_a_cancel_beside_the_first_token_that_ends_it() -> None:
    """Found by the fuzz: the end by length was on its way when the cancel came. It is told once, without tokens."""
    loading = Script((1,), 1, loads=True, continue_at=0, cancel_after=0)
    World(roomy(block_size=1, num_blocks=2), [Script((1,), 1), loading]).run()


def test_what_is_not_exact_serves_its_own_request_alone() -> None:
    """The same prompt four times at once, two of them on blocks that a lossy codec has changed; all are preempted."""
    prompt = (5,) * 18
    scripts = [
        Script(prompt, 20, loads=True, continue_at=2, inexact_blocks=frozenset({1, 3})),
        Script(prompt, 20, arrival=1),
        Script(prompt, 9, arrival=2, hand_off=True, loads=True, inexact_blocks=frozenset({2})),
        Script(prompt, 20, arrival=8, num_moved_tokens=2, loads=True, continue_at=9),
    ]
    for limits in (roomy(), roomy(num_blocks=12), roomy(num_blocks=12, max_num_batched_tokens=3)):
        World(limits, scripts).run()


def test_every_reader_of_a_prefix_gets_the_same() -> None:
    """One computes it, others load it, hand it off and read it from the cache; with leases that outlive them all."""
    prompt = (5,) * 18
    scripts = [
        Script(prompt, 9),
        Script(prompt, 9, arrival=2, hand_off=True, release_delay=6),
        Script(prompt, 9, arrival=2, loads=True, continue_at=4),
        Script(prompt[:9], 9, arrival=3, hand_off=True, loads=True, release_delay=6),
        Script(prompt, 9, arrival=3, num_moved_tokens=3, seed=1),
    ]
    for limits in (roomy(), roomy(num_blocks=9), roomy(num_blocks=9, max_num_batched_tokens=3)):
        world = World(limits, scripts)
        world.run()
        assert world.engine.stats().num_prefix_hits_tokens > 0
