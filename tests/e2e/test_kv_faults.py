"""Whatever happens to blocks on their way, the answer is the reference's. One cluster a connector serves all faults.

`make test` does this over tcp, `make test-connectors` over the others too.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvasir.kv_connector.testing.faulty import Fault
from tests import faulty
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.reference import Prompt
from tests.e2e.test_faults import FETCHED, RECOMPUTED, InBackground, expected, misses, stream
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
NUM_TOKENS = 16
ALWAYS = 1_000_000
CONNECTORS = [
    "FaultyTcp",
    pytest.param("FaultyRedis", marks=pytest.mark.full),
    pytest.param("FaultySharedStorage", marks=pytest.mark.full),
]
_salts = itertools.count()


@dataclass(frozen=True)
class Faulted:
    cluster: Cluster
    script: faulty.Script
    prompt: Prompt

    @property
    def num_blocks(self) -> int:
        return -(-len(self.prompt.token_ids) // BLOCK_SIZE)

    def answer(self) -> list[int]:
        """With a salt of its own, or its blocks would be here already."""
        return stream(self.cluster, self.prompt, cache_salt=f"{next(_salts)}", max_tokens=NUM_TOKENS)

    def fetches(self) -> bool:
        """Whether blocks travel."""
        with self.cluster.deltas(self.cluster.decode, FETCHED) as rose:
            assert self.answer() == self.expected
        return rose[FETCHED] > 0

    def begin(self) -> InBackground:
        return InBackground(self.cluster, self.prompt, cache_salt=f"{next(_salts)}", max_tokens=NUM_TOKENS)

    @property
    def expected(self) -> list[int]:
        return expected(self.prompt)[:NUM_TOKENS]


@pytest.fixture(scope="module", params=CONNECTORS)
def faulted(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulted]:
    script = faulty.Script(tmp_path_factory.mktemp("faults") / "script.json")
    prompt = next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "200-tokens")
    with Cluster(model_dir, f"tests.faulty:{request.param}", environment=script.environment) as cluster:
        yield Faulted(cluster, script, prompt)


REFUSED = {
    "flip": "checksum",
    "truncate": "truncated",
    "header": "header",
    "identity": "identity",
    "layout": "layout",
    "tokens": "tokens",
    "codec": "codec",
}
IN_FULL = {"header", "layout", "tokens", "codec"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full) if kind in IN_FULL else kind for kind in REFUSED]
)
def test_blocks_that_are_not_what_they_should_be(faulted: Faulted, kind: str) -> None:
    """Two of them, both times that they are fetched: their tokens are computed again, and no others."""
    faults = [Fault(kind=kind, block=block, times=2) for block in (2, 7)]
    counter = misses(REFUSED[kind])
    with (
        faulted.script.playing(*faults),
        faulted.cluster.deltas(faulted.cluster.decode, FETCHED, RECOMPUTED, counter) as rose,
    ):
        assert faulted.answer() == faulted.expected
    assert rose == {FETCHED: faulted.num_blocks - 2, RECOMPUTED: 2 * BLOCK_SIZE, counter: 4}


def test_replies_that_are_swapped(faulted: Faulted) -> None:
    counter = misses("key")
    with (
        faulted.script.playing(Fault(kind="swap", block=4), Fault(kind="swap", block=5)),
        faulted.cluster.deltas(faulted.cluster.decode, FETCHED, counter) as rose,
    ):
        assert faulted.answer() == faulted.expected
    assert rose == {FETCHED: faulted.num_blocks, counter: 2}, "each was fetched again"


@pytest.mark.parametrize("kind", ["drop", "delay", "reorder", "duplicate"])
def test_blocks_that_come_late_or_twice_or_not_at_first(faulted: Faulted, kind: str) -> None:
    with (
        faulted.script.playing(*(Fault(kind=kind, block=block, delay_s=0.2) for block in (1, 4, 8))),
        faulted.cluster.deltas(faulted.cluster.decode, FETCHED, RECOMPUTED) as rose,
    ):
        assert faulted.answer() == faulted.expected
    assert rose == {FETCHED: faulted.num_blocks, RECOMPUTED: 0}


def test_all_blocks_are_lost(faulted: Faulted) -> None:
    with (
        faulted.script.playing(Fault(kind="lost", times=ALWAYS)),
        faulted.cluster.deltas(faulted.cluster.decode, FETCHED, RECOMPUTED) as rose,
    ):
        assert faulted.answer() == faulted.expected
    assert rose == {FETCHED: 0, RECOMPUTED: len(faulted.prompt.token_ids)}
    wait_until(faulted.fetches, 60, "what was left alone for a while is tried again")


@pytest.mark.parametrize("strike", ["freeze", "kill"])  # the last one changes the cluster
def test_prefill_node_that_stops_in_mid_transfer(faulted: Faulted, strike: str) -> None:
    cluster, victim = faulted.cluster, faulted.cluster.prefill[-1]
    before = cluster.total(cluster.decode, FETCHED)
    with faulted.script.playing(Fault(kind="delay", delay_s=0.1, times=ALWAYS)):
        answer = faulted.begin()
        wait_until(lambda: cluster.total(cluster.decode, FETCHED) > before, 60, "a block has landed")
        getattr(victim, strike)()
        assert answer.result() == faulted.expected
    if strike == "freeze":
        victim.thaw()
    else:
        assert faulted.answer() == faulted.expected, "a cluster without prefill nodes still serves"
        cluster.add_node("prefill")
    cluster.wait_ready()
    wait_until(faulted.fetches, 60, "all is well again")
