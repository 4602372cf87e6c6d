"""What a request does to its logits before a token is chosen: bias, penalties, masks, in this order."""

from collections import Counter

import torch
from torch import Tensor

from kvasir.engine.sampling_params import SamplingParams

# Shapes: V vocabulary


def processes_logits(params: SamplingParams, num_outputs: int) -> bool:
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or (params.min_tokens > num_outputs and params.stop_token_ids)
    )


def process_logits(
    raw: Tensor, params: SamplingParams, prompt: list[int], outputs: list[int], allowed: Tensor | None = None
) -> Tensor:
    """raw [V], left as it is -> [V]; -inf for what must not come. `allowed` [V]: what the grammar allows, if any"""
    logits = raw.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    _penalise(logits, params, prompt, outputs)
    if allowed is not None:
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
    return _mask(logits, params, outputs)


def _penalise(logits: Tensor, params: SamplingParams, prompt: list[int], outputs: list[int]) -> None:
    """Repetition: prompt and output, once for each distinct token. Presence and frequency: output only."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(prompt + outputs, device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)  # the same for each time it comes
    if outputs and (params.presence_penalty or params.frequency_penalty):
        said = Counter(outputs)
        counts = torch.tensor(list(said.values()), device=logits.device)
        logits[list(said)] -= params.presence_penalty + params.frequency_penalty * counts


def _mask(logits: Tensor, params: SamplingParams, outputs: list[int]) -> Tensor:
    """A rule that leaves nothing to say gives way to those before it: grammar, allowed ids, banned ids."""
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        only = torch.full_like(logits, -torch.inf)
        only[allowed] = logits[allowed]
        logits = _unless_empty(only, logits)
    banned = banned_now(params, outputs)
    if not banned:
        return logits
    rest = logits.clone()
    rest[banned] = -torch.inf
    return _unless_empty(rest, logits)


def _unless_empty(masked: Tensor, before: Tensor) -> Tensor:
    return masked if bool(masked.max() > -torch.inf) else before


def banned_now(params: SamplingParams, outputs: list[int]) -> list[int]:
    """Last tokens of bad words whose beginning has just been said; stop tokens while it is too early to stop."""
    banned = [
        word[-1] for word in params.bad_words if len(word) == 1 or tuple(outputs[1 - len(word) :]) == tuple(word[:-1])
    ]
    if len(outputs) < params.min_tokens:
        banned += params.stop_token_ids
    return banned
