"""What transformers generates greedily, with the check that no choice was a near tie: so equality can be asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

NEAR_TIE = 1e-4  # where the reference's two best are closer than this, rounding may choose either


def greedy_tokens(model_dir: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return [_greedy(reference, prompt, num_tokens) for prompt in prompts]


@torch.inference_mode()
def _greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    out = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR_TIE, "choose another prompt"
    ids: list[int] = out.sequences[0, len(prompt) :].tolist()
    return ids
