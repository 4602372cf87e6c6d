"""Random workloads over real tensors: int8 KV, drafts, priorities, forks, swapping, grammars, penalties, all at once.

Sums in another order are rounded in another way, and then a code of a key here and there is another. So a token may
differ now and then; of what goes wrong with a block, a scale or a draft, nearly nothing would be left as it was.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvasir.common.grammar import Grammar
from kvasir.engine.engine import Engine
from kvasir.engine.forward_pass import Model
from kvasir.engine.host_blocks import HostBlocks
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.speculation.draft_model import DraftModel
from kvasir.engine.speculation.ngram import NgramProposer
from kvasir.engine.speculation.proposer import Proposer
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.swap_space import SwapSpace
from tests.unit.engine.checkpoints import VOCAB, save_checkpoint
from tests.unit.engine.drafting import Always
from tests.unit.engine.forward import CPU
from tests.unit.engine.script import Rule

NUM_WORKLOADS = int(os.environ.get("FUZZ_EXAMPLES", 400)) // 50
ROOMY = Limits(block_size=4, num_blocks=100, max_num_batched_tokens=48, max_num_seqs=8, max_model_len=64)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Lab:
    """Two models of different opinions: the large one is served, the small one drafts."""

    large: Model
    small: Model

    def alone(self, kv_cache_dtype: str) -> Engine:
        """With room for any request, from which nothing is left for the next."""
        limits = replace(ROOMY, enable_prefix_caching=False)
        return Engine(Scheduler(limits), runner_of(self.large, limits.num_blocks, kv_cache_dtype)[0])

    def engine(self, rng: random.Random, kv_cache_dtype: str) -> Engine:
        """With little of everything."""
        limits = replace(
            ROOMY,
            num_blocks=rng.randrange(17, 22),
            max_num_batched_tokens=rng.choice([5, 16, 48]),
            max_num_seqs=rng.choice([2, 4, 8]),
            scheduling_policy="priority",
            priority_aging_s=rng.choice([0.0, 0.01]),
        )
        runner, kv_cache = runner_of(self.large, limits.num_blocks, kv_cache_dtype)
        scheduler = Scheduler(limits)
        num_places = rng.choice([0, 6, 40])
        scheduler.tables.swap = SwapSpace(num_places, HostBlocks(kv_cache, num_places)) if num_places else SwapSpace()
        proposers: list[Proposer | None] = [
            None,
            NgramProposer(1, 3),
            DraftModel(runner_of(self.small, 20, "fp32")[0], replace(limits, num_blocks=20)),
        ]
        proposer = rng.choice(proposers)
        speculator = Speculator(proposer, scheduler, 3, Always()) if proposer is not None else None
        return Engine(scheduler, runner, speculator=speculator)


def runner_of(model: Model, num_blocks: int, kv_cache_dtype: str) -> tuple[ModelRunner, KVCache]:
    kv_cache = KVCache(kv_layout(model.config, 4, torch.float32, kv_cache_dtype), num_blocks, CPU)
    return ModelRunner(model, kv_cache, 64), kv_cache


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    def model(kind: str, **options: int) -> Model:
        directory = tmp_path_factory.mktemp(kind)
        save_checkpoint(directory, kind, **options)
        return load_model(directory, read_model_config(directory), torch.float32, CPU)

    return Lab(model("llama"), model("qwen2", num_hidden_layers=1, hidden_size=32, num_attention_heads=2))


def some_requests(rng: random.Random) -> list[Request]:
    """Made anew with each call, from the same numbers if the generator stands at the same place."""
    return [_some_request(rng, f"r{i}") for i in range(rng.randrange(5, 9))]


def _some_request(rng: random.Random, name: str) -> Request:
    shared, own = rng.randrange(0, 24), rng.randrange(1, 16)
    prompt = [5, 9, 33, 2, 71, 4] * 4
    params: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 24),
        "temperature": rng.choice([0.0, 0.5, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "frequency_penalty": rng.choice([0.0, 0.7]),
        "logit_bias": rng.choice([(), ((5, 4.0), (9, -4.0))]),
        "grammar": rng.choice([None, None, Grammar("regex", ".")]),
    }
    request = Request(
        request_id=RequestId(name),
        prompt_token_ids=prompt[:shared] + [rng.randrange(VOCAB) for _ in range(own)],
        sampling=SamplingParams(**params, seed=rng.randrange(100)),
        priority=rng.randrange(3),
    )
    for i in range(rng.choice([0, 0, 0, 2])):
        fork = Request(
            request_id=RequestId(f"{name}.{i}"),
            prompt_token_ids=request.prompt_token_ids,
            sampling=replace(request.sampling, seed=100 + i),
            priority=request.priority,
        )
        request.forks.append(fork)
    return request


def submit(engine: Engine, request: Request) -> None:
    engine.submit(request)
    if request.sampling.grammar is not None:
        engine.grammar_ready(request.request_id, Rule(20, vocabulary=VOCAB).matcher)


def finish(engine: Engine) -> None:
    while engine.has_work:
        result = engine.step()
        engine.check_invariants()
        assert not result.failed
    assert not engine.scheduler.requests, "they wait for ever"
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    assert engine.stats().num_host_blocks == 0


@pytest.mark.parametrize(("kv_cache_dtype", "least_equal"), [("fp32", 0.99), ("int8", 0.98)])
def test_any_workload_over_real_tensors(lab: Lab, kv_cache_dtype: str, least_equal: float) -> None:
    expected: list[list[int]] = []
    said: list[list[int]] = []
    counts = Counter[str]()
    alone = lab.alone(kv_cache_dtype)
    for seed in range(NUM_WORKLOADS):
        for request in some_requests(random.Random(seed)):
            family, request.forks = [request, *request.forks], []
            for one in family:
                submit(alone, one)
                finish(alone)
            expected += [one.output_token_ids for one in family]
        engine = lab.engine(random.Random(seed), kv_cache_dtype)
        requests = some_requests(random.Random(seed))
        said += [one.output_token_ids for request in requests for one in (request, *request.forks)]
        for request in requests:
            submit(engine, request)
            engine.step()
        finish(engine)
        stats = engine.stats()
        counts += Counter(preempted=stats.num_preemptions, swapped=stats.num_swaps, accepted=stats.num_accepted_tokens)
    num_equal = sum(one == other for one, other in zip(said, expected, strict=True))
    assert num_equal >= least_equal * len(expected)
    assert set(counts) == {"preempted", "swapped", "accepted"}, "nothing was scarce"
