"""The stored answers are the reference's own: one teacher-forced pass of `transformers` over each."""

from pathlib import Path

import pytest

from tests.e2e import reference

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]


def test_stored_answers_are_what_transformers_says(model_dir: Path) -> None:
    import torch

    model = reference.load_model(model_dir)
    stored = reference.answers()
    prompts = reference.prompts(model_dir)
    assert len(prompts) == 24
    for prompt in prompts:
        answer = stored[prompt.name]
        with torch.inference_mode():
            ids = torch.tensor([[*prompt.token_ids, *answer.token_ids[:-1]]])
            logits = model(ids, use_cache=False, logits_to_keep=len(answer.token_ids)).logits[0]
        best = logits.argmax(-1).tolist()
        wrong = [i for i, token in enumerate(answer.token_ids) if best[i] != token and answer.margins[i] > 1e-4]
        assert not wrong, f"{prompt.name}: other tokens at {wrong}"
