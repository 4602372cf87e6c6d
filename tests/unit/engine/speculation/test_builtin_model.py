"""On the built-in model: greedy tokens of transformers, and the draws that are made without drafts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from tests.unit.engine.drafting import Always
from tests.unit.engine.greedy_reference import greedy_tokens

pytestmark = [pytest.mark.parity, pytest.mark.full, pytest.mark.timeout(1800)]

NUM_TOKENS = 32
PASSAGE = (
    "The harbour master counted the boats twice before supper. There were forty three of them, and one had no name. "
    "He wrote the number down, closed the book, and went to look for the owner of the boat without a name. "
)
TEXTS = (PASSAGE + PASSAGE[:60], "Once upon a time", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer(text).input_ids for text in TEXTS]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_tokens(model_dir, prompts, NUM_TOKENS)


def run(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    requests = [
        Request(
            request_id=RequestId(f"r{i}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=i, **params),
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    engine.check_invariants()
    return [request.output_token_ids for request in requests]


def test_same_tokens(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Greedy as transformers, seeded as without; by prompt lookup, and by the model itself as its own draft model."""
    settings = EngineSettings(model=str(model_dir), num_threads=1, max_model_len=256, kv_cache_memory=64 << 20)
    seeded = {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.2}
    plain, _, _ = build_engine(settings)
    drawn = run(plain, prompts, **seeded)
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
    model = SpeculativeConfig(model=model_dir, num_speculative_tokens=3)
    for config, fewest_accepted in ((lookup, 10), (model, 50)):
        engine, _, _ = build_engine(replace(settings, speculation=config))
        assert engine.speculator is not None
        engine.speculator.payoff = Always()
        assert run(engine, prompts) == expected
        assert engine.stats().num_accepted_tokens > fewest_accepted
        assert run(engine, prompts, **seeded) == drawn
