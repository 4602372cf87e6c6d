"""The test that defines the product: output does not depend on how the work is cut.

24 prompts, greedy, 64 tokens, through clusters of real processes, equal to `transformers` token by token. The factors:
connector, topology, size of the decode nodes' KV cache, alone or 16 at once, cold or warm. The setups below cover all
pairs of them in few cluster starts, each prompt warm in three of them; `make test-parity` runs the full product.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.reference import Answer, Prompt

pytestmark = [pytest.mark.cluster, pytest.mark.parity, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
# Blocks for the longest prompt and its answer, and hardly more.
SMALL_CACHE = ("--kv-cache-memory", str(136 * 737_280))
# Beside the prompts at once, in a small cache, so many requests a decode node that together outgrow it: 10 x 15 blocks.
NUM_FILLERS, FILLER_PROMPT_TOKENS, FILLER_OUTPUT_TOKENS = 10, 90, 150
MAX_TIES = 1  # prompts a run that may differ, where the reference's two best logits are closer than this:
TIE = 1e-4


@dataclass(frozen=True)
class Setup:
    connector: str
    num_prefill: int
    num_decode: int
    small_cache: bool
    rotation: int  # which sixth of the prompts runs alone in the cold pass; in the warm one it is another
    warm_half: int  # which half of the prompts is asked again
    all_modes: bool = False  # full product: every prompt both alone and at once, cold and warm

    def __str__(self) -> str:
        size = "small" if self.small_cache else "large"
        return f"{self.connector}-{self.num_prefill}P{self.num_decode}D-{size}{'-full' if self.all_modes else ''}"


PAIRS = [
    Setup("tcp", 1, 1, False, 0, 0),
    Setup("tcp", 2, 2, True, 1, 1),
    Setup("redis", 1, 1, True, 2, 0),
    Setup("redis", 2, 2, False, 3, 1),
    Setup("shared_storage", 1, 1, False, 4, 1),
    Setup("shared_storage", 2, 2, True, 5, 0),
]
FULL = [
    Setup(connector, *nodes, small, 0, 0, all_modes=True)
    for connector, nodes, small in product(("tcp", "redis", "shared_storage"), ((1, 1), (2, 2)), (False, True))
]
SETUPS = [*PAIRS, *(pytest.param(setup, marks=pytest.mark.full) for setup in FULL)]


@pytest.fixture(params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    setup: Setup = request.param
    return setup


@pytest.fixture
def cluster(setup: Setup, model_dir: Path) -> Iterator[Cluster]:
    with Cluster(
        model_dir,
        setup.connector,
        num_prefill=setup.num_prefill,
        num_decode=setup.num_decode,
        router_args=("--max-local-prefill-tokens", "64") if setup.num_decode > 1 else (),
        decode_args=SMALL_CACHE if setup.small_cache else (),
    ) as cluster:
        yield cluster


def test_output_equals_transformers(setup: Setup, cluster: Cluster, model_dir: Path) -> None:
    prompts = reference.prompts(model_dir)
    alone = prompts[setup.rotation :: 6]
    together = [prompt for prompt in prompts if prompt not in alone]
    run = Run(cluster, reference.answers())

    fetched, cached = "kvasir:kv_blocks_fetched_total", "kvasir:kv_blocks_cached_total"
    recomputed = "kvasir:prompt_tokens_recomputed_total"
    preemptions = "vllm:num_preemptions_total"
    num_fillers = NUM_FILLERS * setup.num_decode if setup.small_cache else 0
    num_blocks = sum(num_blocks_of(len(prompt.token_ids)) for prompt in prompts)
    num_blocks += num_fillers * num_blocks_of(FILLER_PROMPT_TOKENS)

    with cluster.deltas(cluster.decode, fetched, recomputed, preemptions) as cold:
        run.alone(alone, salt="cold")
        run.together(together, salt="cold", num_fillers=num_fillers)
    if setup.small_cache and setup.connector != "tcp":  # who gave way may have fetched from the store once more
        assert cold[fetched] >= num_blocks
    else:
        assert cold[fetched] == num_blocks, "every block of every prompt came over the connector"
    if setup.small_cache:
        assert cold[preemptions] > 0
    else:
        assert cold[recomputed] == 0
        assert cold[preemptions] == 0

    again = prompts[setup.warm_half :: 2]
    alone = again[setup.rotation // 2 + 1 :: 6]
    together = [prompt for prompt in again if prompt not in alone]
    with cluster.deltas(cluster.decode, fetched, cached, recomputed) as warm:
        before = run.num_cached_tokens
        run.alone(alone, salt="cold")
        run.together(together, salt="cold")
        cached_tokens = run.num_cached_tokens - before
    if not setup.small_cache and setup.num_prefill == 1:
        # All full blocks but the one that holds the last token; that one is computed, or fetched, again.
        counted = [(len(prompt.token_ids) - 1) // BLOCK_SIZE for prompt in again]
        assert cached_tokens == sum(counted) * BLOCK_SIZE
        assert warm[cached] == sum(counted)
        assert warm[fetched] == len(again)
        assert warm[recomputed] == 0
    else:
        assert cached_tokens > 0

    if setup.all_modes:
        run.alone(prompts, salt="cold alone")
        run.alone(prompts, salt="cold alone")
        run.together(prompts, salt="cold again")
        run.together(prompts, salt="cold again")
    run.check_ties()


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Run:
    """Sends prompts and holds the answers against the reference."""

    def __init__(self, cluster: Cluster, answers: dict[str, Answer]) -> None:
        self._cluster = cluster
        self._answers = answers
        self._model = cluster.model
        self._ties: set[str] = set()
        self.num_cached_tokens = 0

    def alone(self, prompts: Sequence[Prompt], salt: str) -> None:
        asyncio.run(self._send_all(prompts, 1, salt))

    def together(self, prompts: Sequence[Prompt], salt: str, num_fillers: int = 0) -> None:
        asyncio.run(self._send_all(prompts, 16, salt, num_fillers))

    def check_ties(self) -> None:
        assert len(self._ties) <= MAX_TIES, f"differ where the reference is nearly tied: {sorted(self._ties)}"

    async def _send_all(self, prompts: Sequence[Prompt], concurrency: int, salt: str, num_fillers: int = 0) -> None:
        seats = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency + num_fillers)
        async with httpx.AsyncClient(base_url=self._cluster.url, timeout=300, limits=limits) as client:

            async def send(prompt: Prompt) -> None:
                async with seats:
                    self._check(prompt, await self._send(client, prompt, salt))

            async with asyncio.TaskGroup() as tasks:
                for index in range(num_fillers):
                    tasks.create_task(self._send_filler(client, index))
                for prompt in prompts:
                    tasks.create_task(send(prompt))

    async def _send_filler(self, client: httpx.AsyncClient, index: int) -> None:
        body = {"model": self._model, "prompt": [100 + index] * FILLER_PROMPT_TOKENS, "ignore_eos": True, "seed": index}
        body |= {"max_tokens": FILLER_OUTPUT_TOKENS, "cache_salt": f"filler {index}"}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == FILLER_OUTPUT_TOKENS

    async def _send(self, client: httpx.AsyncClient, prompt: Prompt, salt: str) -> list[int]:
        # A salt of its own keeps two prompts that begin alike from sharing blocks, so that blocks can be counted.
        body: dict[str, object] = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": reference.NUM_OUTPUT_TOKENS,
            "return_token_ids": True,
            "cache_salt": f"{salt} {prompt.name}",
        }
        if prompt.chat is None:
            path, body = "/v1/completions", {**body, "prompt": list(prompt.token_ids), "ignore_eos": True}
        else:
            path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.chat}]}
        response = await client.post(path, json=body)
        assert response.status_code == 200, f"{prompt.name}: {response.text}"
        answer = response.json()
        assert answer["usage"]["prompt_tokens"] == len(prompt.token_ids)
        self.num_cached_tokens += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def _check(self, prompt: Prompt, ours: list[int]) -> None:
        answer = self._answers[prompt.name]
        theirs = list(answer.token_ids)
        if prompt.chat is not None and ours == theirs[:-1]:
            return  # the end-of-sequence token need not be reported
        if ours == theirs:
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        story = f"{prompt.name}: token {at} is {ours[at : at + 1]}, transformers has {theirs[at : at + 1]}"
        assert at < len(theirs), story
        story += f"; its best two logits differ by {answer.margins[at]:.2e}"
        print(story)
        assert answer.margins[at] < TIE, story
        assert ours[at] == answer.runners_up[at], story
        self._ties.add(prompt.name)
