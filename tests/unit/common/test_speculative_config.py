from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.common.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (2, 4)),
    ],
)
def test_what_is_looked_up(given: dict[str, int], lookup: tuple[int, int]) -> None:
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=4, **given).lookup == lookup  # type: ignore[arg-type]


def test_a_model_says_the_method() -> None:
    for given in ({}, {"method": "draft_model"}):
        config = SpeculativeConfig.model_validate({"model": "/m", "num_speculative_tokens": 3, **given})
        assert (config.model, config.num_speculative_tokens) == (Path("/m"), 3)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, "ngram or a model"),
        ({"num_speculative_tokens": 0, "method": "ngram"}, "greater than 0"),
        ({"num_speculative_tokens": 3, "method": "eagle"}, "ngram"),
        ({"num_speculative_tokens": 3, "method": "ngram", "model": "/m"}, "needs no model"),
        ({"num_speculative_tokens": 3, "method": "draft_model"}, "needs a model"),
        ({"num_speculative_tokens": 3, "model": "/m", "prompt_lookup_max": 2}, "belong to method ngram"),
        ({"num_speculative_tokens": 3, "method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "more than"),
        ({"num_speculative_tokens": 3, "method": "ngram", "draft_tensor_parallel_size": 1}, "Extra inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SpeculativeConfig.model_validate(given)
