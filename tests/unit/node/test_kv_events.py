"""From an engine's prefix cache to what a router knows of it: the same, whatever is merged or missed on the way."""

import random

import pytest

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.engine import Engine
from kvasir.node import kv_feed
from kvasir.node.kv_feed import KVFeed, KVMirror
from kvasir.router.node_events import kv_events_from_proto
from kvasir.router.prefix_index import HeldBlocks, Prefix
from tests.unit.engine.test_engine import make_engine, make_request

IDENTITY, BLOCK_SIZE, NUM_BLOCKS = b"fake-model", 4, 24
MAX_STEPS = 10_000


class Listener:
    """A router's view of one engine. It comes late, hears now and then, and misses some of it."""

    def __init__(self, mirror: KVMirror) -> None:
        self.feed = KVFeed(mirror)
        self.held = HeldBlocks(IDENTITY, BLOCK_SIZE, NUM_BLOCKS, self.feed.ask_snapshot)

    def hear(self, rng: random.Random, share_lost: float) -> None:
        for message in self.feed.take():
            if rng.random() >= share_lost:
                self.held.apply(kv_events_from_proto(message))


@pytest.mark.parametrize("seed", range(12))
def test_a_router_guesses_what_the_engine_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_MAX_ENTRIES", 5)
    rng = random.Random(seed)
    engine, mirror = make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, budget=rng.choice([3, 64])), KVMirror()
    early, late = Listener(mirror), None
    stems = [[rng.randrange(900) for _ in range(24)] for _ in range(3)]
    num_asked = num_steps = 0
    while num_asked < 60 or engine.has_work:
        if num_asked < 60 and rng.random() < 0.3:
            prompt = [*rng.choice(stems)[: rng.randrange(1, 25)], *rng.choices(range(900), k=rng.randrange(12))]
            engine.submit(make_request(f"r{num_asked}", prompt, max_tokens=rng.randrange(1, 12)))
            num_asked += 1
        if not engine.has_work:
            continue
        result = engine.step()
        num_steps += 1
        assert num_steps < MAX_STEPS
        mirror.apply(result.stored, result.dropped)
        assert mirror.hashes == set(engine.scheduler.tables.cache.snapshot())
        early.feed.add(result.stored, result.dropped)
        if late is not None:
            late.feed.add(result.stored, result.dropped)
            if rng.random() < 0.5:
                late.hear(rng, 0.0)
                assert guesses(late, engine, stems) == findings(engine, stems)
        elif num_asked == 20:
            late = Listener(mirror)
        if rng.random() < 0.3:
            early.hear(rng, 0.2)
    assert late is not None
    for listener in (early, late):
        for _ in range(2):  # should the last word have been missed, all of it comes again
            listener.feed.ask_snapshot()
            listener.hear(rng, 0.0)
        assert guesses(listener, engine, stems) == findings(engine, stems)
        assert len(listener.held) == len(mirror.hashes) > 0


def guesses(listener: Listener, engine: Engine, prompts: list[list[int]]) -> list[int]:
    return [listener.held.num_cached_tokens(Prefix(prompt)) for prompt in prompts]


def findings(engine: Engine, prompts: list[list[int]]) -> list[int]:
    hashes = [block_hashes(root_hash(IDENTITY), prompt[:-1], BLOCK_SIZE) for prompt in prompts]
    return [len(engine.scheduler.tables.cache.match(one)) * BLOCK_SIZE for one in hashes]


@pytest.mark.parametrize("seed", range(12))
def test_what_was_missed_is_asked_for_and_then_all_is_known(seed: int) -> None:
    """Each message is lost with a chance of one in five; two undisturbed rounds later the router is up to date."""
    rng = random.Random(seed)
    engine, mirror = make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), KVMirror()
    listener = Listener(mirror)
    for number in range(120):
        engine.submit(make_request(f"r{number}", rng.choices(range(900), k=rng.randrange(1, 30)), max_tokens=4))
        while engine.has_work:
            result = engine.step()
            mirror.apply(result.stored, result.dropped)
            listener.feed.add(result.stored, result.dropped)
            disturbs = number < 118
            listener.hear(rng, 0.2 if disturbs else 0.0)
            if number == 119:
                assert len(listener.held) == len(mirror.hashes)
