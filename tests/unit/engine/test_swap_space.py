"""Blocks kept on the host: counted, measured, exact, and given back."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.preemption import Way
from kvasir.engine.request import Phase, RequestId
from kvasir.engine.swap_space import HostBlock, SwapSpace
from tests.fakes import fake_tokens
from tests.unit.engine.script import Script
from tests.unit.engine.test_engine import hash_of, make_engine, make_request, outputs_of, run, runner_of
from tests.unit.engine.world import Host, Surroundings, World


def test_places_are_free_or_held() -> None:
    space = SwapSpace(3)
    places = space.save([BlockId(7), BlockId(8)])
    assert (space.num_free, space.num_used) == (1, 2)
    space.check_invariant(places)
    with pytest.raises(RuntimeError, match="2 blocks for 1 free"):
        space.save([BlockId(1), BlockId(2)])
    with pytest.raises(AssertionError):
        space.check_invariant([])
    space.release(places)
    space.check_invariant([])


def test_copies_are_measured_and_forgotten_when_long_unused() -> None:
    times: Iterator[float] = iter([0.0, 2.0, 2.0, 3.0])
    space = SwapSpace(8, clock=lambda: next(times))
    assert space.copy_s_per_block is None
    places = space.save([BlockId(0), BlockId(1)])
    assert space.copy_s_per_block == 1.0
    space.load(places, [BlockId(2), BlockId(3)])
    assert space.copy_s_per_block == pytest.approx(0.85)
    for _ in range(31):
        space.decline()
    assert space.copy_s_per_block is not None
    space.decline()
    assert space.copy_s_per_block is None, "so that it is measured again"


def test_one_block_is_enough_to_measure_a_copy() -> None:
    times: Iterator[float] = iter([0.0, 2.0])
    space = SwapSpace(8, clock=lambda: next(times))
    space.measure()
    assert (space.copy_s_per_block, space.num_free, space.num_saved_blocks) == (2.0, 8, 0)
    space.measure()  # known: the clock is not asked
    nowhere = SwapSpace(0)
    nowhere.measure()
    assert nowhere.copy_s_per_block is None


def swapping(num_host_blocks: int = 20, **options: int) -> Engine:
    engine = make_engine(num_blocks=6, watermark=0, **options)
    engine.scheduler.tables.swap = SwapSpace(num_host_blocks, Host(runner_of(engine).kv))
    return engine


def pressed(engine: Engine) -> tuple[list[int], list[int]]:
    """What two requests generate that do not fit together."""
    results = run(engine, make_request("first", [1] * 8, 12), make_request("second", [2] * 8, 12))
    return outputs_of(results, "first")[0], outputs_of(results, "second")[0]


def test_what_was_swapped_is_not_computed_again_and_says_the_same() -> None:
    engine = swapping()
    expected = tuple(fake_tokens([i] * 8, 12, hash_of(name)) for i, name in ((1, "first"), (2, "second")))
    assert pressed(engine) == expected
    stats, swap = engine.stats(), engine.scheduler.tables.swap
    assert stats.num_swaps == stats.num_preemptions == 1
    assert 0 < swap.num_loaded_blocks <= swap.num_saved_blocks
    computed = [chunk for plan in runner_of(engine).plans for chunk in plan.chunks]
    assert sum(chunk.num_tokens for chunk in computed) == 2 * (8 + 12 - 1), "each token once"
    assert stats.num_host_blocks == 0


def test_where_the_host_is_full_the_rest_is_computed() -> None:
    engine = swapping(num_host_blocks=1)
    assert pressed(engine) == pressed(swapping())
    assert engine.scheduler.preemptions == {Way.RECOMPUTE: 1}


def test_who_is_cancelled_on_the_host_leaves_nothing_there() -> None:
    engine = swapping()
    engine.submit(make_request("first", [1] * 8, 12))
    engine.submit(second := make_request("second", [2] * 8, 12))
    while second.phase is not Phase.WAITING or not second.num_preemptions:
        engine.step()
    assert engine.stats().num_host_blocks > 0
    engine.cancel(RequestId("second"))
    engine.check_invariants()
    assert engine.stats().num_host_blocks == 0


def test_what_others_hold_too_is_not_copied() -> None:
    """The prompt's blocks are shared by both; the second's own ones alone go to the host."""
    engine = swapping()
    run(engine, make_request("warm", [1] * 9, 1))
    requests = [make_request(name, [1] * 9, 10) for name in ("first", "second")]
    results = run(engine, *requests)
    for name in ("first", "second"):
        assert outputs_of(results, name)[0] == fake_tokens([1] * 9, 10, hash_of(name))
    swap = engine.scheduler.tables.swap
    assert engine.stats().num_swaps > 0
    assert swap.num_saved_blocks <= 3 * engine.stats().num_swaps, "two of up to five are shared"


def test_a_hole_among_landed_blocks_survives_a_swap() -> None:
    """Blocks 0 and 2.. have landed, block 1 is being computed token by token when its owner has to give way: what is
    half computed is not mistaken for a block that has landed."""
    limits = make_engine(num_blocks=9, block_size=4, budget=2, watermark=0).scheduler.limits
    scripts = [
        Script((7,) * 3, 24),
        Script((5,) * 16, 4, arrival=3, loads=True, continue_at=1, lost_blocks=frozenset({1}), blocks_per_tick=4),
    ]
    for arrival in range(2, 14):
        scripts[1] = Script(
            **{**{f: getattr(scripts[1], f) for f in scripts[1].__dataclass_fields__}, "arrival": arrival}
        )
        World(limits, scripts, Surroundings(num_host_blocks=20)).run()


def test_the_host_keeps_its_own_copy() -> None:
    kv = np.arange(8).reshape(2, 4)
    host = Host(kv)
    host.save(BlockId(0), HostBlock(0))
    kv[0] = 9
    host.load(HostBlock(0), BlockId(1))
    assert kv.tolist() == [[9] * 4, [0, 1, 2, 3]]
