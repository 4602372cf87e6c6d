"""A cluster whose decode node speculates says what one without does, and says how often it guessed right."""

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e.asker import Asker, ask

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
COUNTERS = tuple(f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens"))
PASSAGE = "The harbour master counted the boats twice before supper. There were forty three, and one had no name. "
BODIES = [
    {"prompt": 2 * PASSAGE + PASSAGE[:30], "temperature": 0},
    {"prompt": 2 * PASSAGE + PASSAGE[:30], "temperature": 0.5, "seed": 7, "n": 2, "frequency_penalty": 0.1},
    {"prompt": "1, 2, 3, 4, 1, 2, 3, 4,", "temperature": 0, "logprobs": 1},
    {"prompt": "1, 2, 3, 1, 2,", "temperature": 0, "structured_outputs": {"regex": "( [1-3],){9}"}},
]


def answers(cluster: Cluster) -> list[list[list[int]]]:
    found: list[list[list[int]]] = []

    async def script(asker: Asker) -> None:
        for body in BODIES:
            whole = await asker.whole(max_tokens=32, ignore_eos=True, return_token_ids=True, **body)
            found.append([choice["token_ids"] for choice in whole["choices"]])

    ask(cluster, script)
    return found


def test_the_same_tokens_with_and_without(cluster: Cluster, model_dir: Path) -> None:
    expected = answers(cluster)
    assert [len(choices) for choices in expected] == [1, 2, 1, 1]
    with Cluster(model_dir, decode_args=["--speculative-config", CONFIG]) as speculating:
        with speculating.deltas(speculating.decode, *COUNTERS) as rose:
            assert answers(speculating) == expected
        drafts, draft_tokens, accepted = (rose[name] for name in COUNTERS)
        assert 0 < drafts <= draft_tokens
        assert 10 < accepted <= draft_tokens
