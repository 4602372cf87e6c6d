"""What goes wrong, and that nobody sees it: the answer is complete and equal, and only what was lost is recomputed."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests import faulty
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.reference import NUM_OUTPUT_TOKENS, Prompt
from tests.service import Service
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_SIZE = 16
FETCHED = "kvasir:kv_blocks_fetched_total"
RECOMPUTED = "kvasir:prompt_tokens_recomputed_total"
COMPUTED = "kvasir:prompt_tokens_computed_total"
# Every block comes late, so that something else can strike in mid-transfer.
SLOW = {"kind": "delay", "delay_s": 0.5, "times": 1_000_000}
LONG = {"max_tokens": 200}  # so that a node is still at it when it has been found out which one it is


def script(faults: list[dict[str, object]]) -> dict[str, str]:
    return {faulty.VARIABLE: json.dumps(faults)}


def misses(reason: str) -> str:
    return f'kvasir:kv_misses_total{{reason="{reason}"}}'


@pytest.fixture(scope="module")
def prompt(model_dir: Path) -> Prompt:
    return next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "513-tokens")


def stream(
    cluster: Cluster, prompt: Prompt, on_token: Callable[[int], None] = lambda count: None, **more: object
) -> list[int]:
    """The answer's token ids, streamed; `on_token` hears how many there are."""
    ids: list[int] = []
    options = {"temperature": 0, "max_tokens": NUM_OUTPUT_TOKENS, "stream": True}
    chunks = cluster.client().completions.create(  # type: ignore[call-overload]
        model=cluster.model,
        prompt=list(prompt.token_ids),
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
        **options,
    )
    for chunk in chunks:
        new = getattr(chunk.choices[0], "token_ids", None) or []
        ids += new
        if new:
            on_token(len(ids))
    return ids


def expected(prompt: Prompt) -> list[int]:
    return list(reference.answers()[prompt.name].token_ids)


class InBackground:
    """Runs `stream` in a thread, so that the test can strike meanwhile."""

    def __init__(self, cluster: Cluster, prompt: Prompt, **more: object) -> None:
        self.count = 0
        self._ids: list[int] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(cluster, prompt), kwargs=more)
        self._thread.start()

    def _run(self, cluster: Cluster, prompt: Prompt, **more: object) -> None:
        try:
            self._ids = stream(cluster, prompt, lambda count: setattr(self, "count", count), **more)
        except BaseException as error:
            self._error = error

    def result(self, timeout_s: float = 240) -> list[int]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"
        if self._error is not None:
            raise self._error
        return self._ids


@pytest.fixture(scope="module")
def struck(model_dir: Path) -> Iterator[Cluster]:
    """One cluster that loses nodes in test after test; each first makes good what it needs, if there are too few."""
    with Cluster(model_dir, num_prefill=3, num_decode=2) as cluster:
        yield cluster


def busy_node(nodes: list[Service]) -> Service:
    found: list[Service] = []

    def look() -> bool:
        found[:] = [node for node in nodes if node.metrics()["vllm:num_requests_running"] > 0]
        return bool(found)

    wait_until(look, 60, "one of the nodes computes")
    return found[0]


def test_killed_prefill_node_before_the_first_token(struck: Cluster, model_dir: Path) -> None:
    struck.have_at_least(2, 1)
    long = next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "2000-tokens")
    answer = InBackground(struck, long)
    busy_node(struck.living("prefill")).kill()
    assert answer.result() == expected(long)


def test_16_streams_survive_the_loss_of_a_prefill_node(struck: Cluster, model_dir: Path) -> None:
    struck.have_at_least(2, 1)
    prompt = next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "200-tokens")
    body = {
        "model": struck.model,
        "prompt": list(prompt.token_ids),
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def run() -> None:
        async with httpx.AsyncClient(base_url=struck.url, timeout=120) as client:
            sent = [
                asyncio.create_task(client.post("/v1/completions", json={**body, "cache_salt": f"{i}"}))
                for i in range(16)
            ]
            await asyncio.to_thread(wait_until, lambda: computed() >= before + 500, 60, "some are computed, some wait")
            victim = await asyncio.to_thread(busy_node, struck.living("prefill"))
            await asyncio.to_thread(victim.kill)
            for response in await asyncio.gather(*sent):
                assert response.status_code == 200, response.text
                assert response.json()["choices"][0]["token_ids"] == expected(prompt)[:24]

    def computed() -> float:
        return struck.total(struck.living("prefill"), COMPUTED)

    before = computed()
    asyncio.run(run())


def test_frozen_decode_node_in_mid_stream(struck: Cluster, prompt: Prompt) -> None:
    """Its port stays open, its kernel answers: only the silence tells. The answer keeps to its grammar elsewhere."""
    struck.have_at_least(1, 2)
    grammar = {"structured_outputs": {"regex": "([A-Z][a-z]{2,9} [0-9]+; )+"}}
    undisturbed = stream(struck, prompt, **grammar)
    answer = InBackground(struck, prompt, **LONG, **grammar)
    wait_until(lambda: answer.count >= 5, 60, "five tokens")
    victim = busy_node(struck.living("decode"))
    victim.freeze()
    try:
        assert answer.result()[:NUM_OUTPUT_TOKENS] == undisturbed
    finally:
        victim.thaw()


def test_killed_decode_node_in_mid_stream(struck: Cluster, prompt: Prompt) -> None:
    struck.have_at_least(1, 2)
    answer = InBackground(struck, prompt, **LONG)
    wait_until(lambda: answer.count >= 5, 60, "five tokens")
    busy_node(struck.living("decode")).kill()
    ids = answer.result()
    assert (ids[:NUM_OUTPUT_TOKENS], len(ids)) == (expected(prompt), LONG["max_tokens"])


def test_draining_node_finishes_what_it_has(struck: Cluster, prompt: Prompt) -> None:
    """And where it was the only one, the cluster says that it is not ready."""
    struck.have_at_least(1, 1)
    for surplus in struck.living("decode")[1:]:
        assert surplus.terminate(timeout_s=60) == 0
    [only] = struck.living("decode")
    answer = InBackground(struck, prompt)
    wait_until(lambda: answer.count >= 3, 60, "three tokens")
    assert only.terminate(timeout_s=60) == 0
    assert answer.result() == expected(prompt)
    ready = f"{struck.url}/ready"
    wait_until(lambda: httpx.get(ready, timeout=60).status_code == 503, 60, "without a decode node, it is not ready")
    struck.have_at_least(1, 1)
    assert stream(struck, prompt) == expected(prompt)


def test_stopped_redis(model_dir: Path, prompt: Prompt) -> None:
    with Cluster(model_dir, "tests.faulty:FaultyRedis", environment=script([SLOW])) as cluster:
        assert cluster.redis is not None
        num_blocks = -(-len(prompt.token_ids) // BLOCK_SIZE)
        before = cluster.total(cluster.decode, FETCHED)
        with cluster.deltas(cluster.decode, FETCHED, RECOMPUTED) as rose:
            answer = InBackground(cluster, prompt)
            wait_until(lambda: cluster.total(cluster.decode, FETCHED) > before, 60, "first block")
            cluster.redis.kill()
            assert answer.result() == expected(prompt)
        assert 0 < rose[FETCHED] < num_blocks
        assert rose[RECOMPUTED] > 0
        assert stream(cluster, prompt) == expected(prompt), "without its store, the cluster still serves"


@pytest.mark.parametrize("connector", ["redis", "shared_storage"])
def test_second_prefill_node_takes_a_prompt_from_the_store(connector: str, model_dir: Path) -> None:
    long = next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "2000-tokens")
    with Cluster(model_dir, connector, num_prefill=2) as cluster:
        assert stream(cluster, long, max_tokens=8) == expected(long)[:8]
        second, first = sorted(cluster.prefill, key=lambda node: node.metrics()[COMPUTED])
        assert first.terminate(timeout_s=60) == 0
        with cluster.deltas([second], COMPUTED) as rose:
            assert stream(cluster, long, max_tokens=8) == expected(long)[:8]
        assert 0 < rose[COMPUTED] < 512, "less than one chunk was computed"
