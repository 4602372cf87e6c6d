"""One position to be sampled: what its request wants there, in the terms of the kernels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.request import Request
from kvasir.engine.sampling_params import SamplingParams
from kvasir.kernels.choose import Change, Draw
from kvasir.kernels.sample import uniform

# Shapes: V vocabulary

Mask = NDArray[np.bool_]  # [V], by a grammar: which tokens may come next; at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What a request wants of a token, and what comes before it."""

    params: SamplingParams
    prompt: Sequence[int]
    outputs: Sequence[int]  # drafts before this position among them
    allowed: Mask | None = None

    @property
    def draw(self) -> Draw:
        params = self.params
        if params.is_greedy:
            return Draw()
        u = uniform(params.seed, len(self.prompt) + len(self.outputs))
        return Draw(params.temperature, u, params.top_k, params.top_p, params.min_p)

    def change(self, vocabulary: int) -> Change | None:
        """Of the raw logits; None: they stay as they are."""
        params, allowed = self.params, self.allowed_by_all(vocabulary)
        seen: dict[int, int] = {}
        if params.repetition_penalty != 1:
            seen = dict.fromkeys(self.prompt, 0)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            seen |= Counter(self.outputs)
        if not (seen or params.logit_bias or allowed is not None):
            return None
        return Change(
            params.logit_bias, params.repetition_penalty, params.presence_penalty, params.frequency_penalty, seen,
            allowed,
        )  # fmt: skip

    def allowed_by_all(self, vocabulary: int) -> Mask | None:
        """A rule that leaves nothing to say gives way to those before it: grammar, allowed ids, banned ids."""
        allowed, only, banned = self.allowed, list(self.params.allowed_token_ids), self._banned()
        if allowed is None and not only and not banned:
            return None
        mask = np.ones(vocabulary, np.bool_) if allowed is None else allowed[:vocabulary].copy()
        if only and mask[only].any():
            chosen = np.zeros_like(mask)
            chosen[only] = mask[only]
            mask = chosen
        if banned:
            rest = mask.copy()
            rest[banned] = False
            mask = rest if rest.any() else mask
        return mask

    def _banned(self) -> list[int]:
        """Last tokens of bad words whose beginning has just been said; stop tokens while it is too early to stop."""
        params, outputs = self.params, self.outputs
        banned = [
            word[-1]
            for word in params.bad_words
            if len(word) == 1 or tuple(outputs[1 - len(word) :]) == tuple(word[:-1])
        ]
        if len(outputs) < params.min_tokens:
            banned += params.stop_token_ids
        return banned


def rows_of(request: Request, drafts: Sequence[int], allowed: Mask | None = None) -> list[SamplingRow]:
    """Each position as if the drafts before it had been accepted; if they are not, it does not count.

    allowed: at the first
    """
    outputs = request.output_token_ids
    return [
        SamplingRow(
            params=request.sampling,
            prompt=request.prompt_token_ids,
            outputs=[*outputs, *drafts[:i]] if i else outputs,
            allowed=None if i else allowed,
        )
        for i in range(1 + len(drafts))
    ]
