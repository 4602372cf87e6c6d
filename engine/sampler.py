"""From logits to tokens. Each row by itself: what else is in the batch makes no difference to it.

    raw logits -> logit_bias -> penalties -> masks -> greedy: argmax
                                                   -> temperature -> top-k, top-p, min-p -> draw

There is no generator and no state: the draw uses one number made from (seed, position), so a request may be preempted,
moved or recomputed and goes on with the same tokens.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kvasir.common.errors import InvalidRequest
from kvasir.engine.grammar_step import Masks, advanced
from kvasir.engine.logits import process_logits, processes_logits
from kvasir.engine.request import Request
from kvasir.engine.step import PositionLogprobs, Sampled

# Shapes: R rows, one a request  V vocabulary

_CANDIDATES = (64, 1024)  # top-p is looked for among so many best ones first; sorting all takes milliseconds


def sample(logits: Tensor, requests: Sequence[Request], masks: Masks = MappingProxyType({})) -> list[Sampled]:
    """logits [R, V], the raw ones: left as they are -> the next token of each request"""
    finite = logits.sum(-1).isfinite().tolist()  # one that is not makes the sum so
    best: list[int] = logits.argmax(-1).tolist()
    return [
        _sample_row(logits[row], request, best[row], masks.get(request.request_id))
        if finite[row]
        else Sampled(token_ids=(), is_finite=False)
        for row, request in enumerate(requests)
    ]


def _sample_row(raw: Tensor, request: Request, best: int, mask: Tensor | InvalidRequest | None) -> Sampled:
    if isinstance(mask, InvalidRequest):
        return Sampled(error=mask)
    params = request.sampling
    logits = raw if mask is None and not processes_logits(request) else process_logits(raw, request, mask)
    if not params.is_greedy:
        token = draw(logits, params.temperature, params.top_k, params.top_p, params.min_p,
                     uniform(params.seed, request.num_tokens))  # fmt: skip
    else:
        token = best if logits is raw else int(logits.argmax())
    logprobs = () if params.logprobs is None else (position_logprobs(raw, token, params.logprobs),)
    return advanced(request, Sampled((token,), logprobs))


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """Where u in [0, 1) falls in the distribution, its tokens in ascending order. logits [V]; ties stay together."""
    scaled = logits / temperature
    scaled = scaled - scaled.max()  # the best is 0
    ids: Tensor | None = None  # of what is left; None: all
    if 0 < top_k < len(scaled):
        scaled, ids = _at_least(scaled, ids, scaled.topk(top_k).values[-1])
    if top_p < 1:
        scaled, ids = _at_least(scaled, ids, _top_p_threshold(scaled, top_p))
    weights = scaled.double().exp()
    if min_p > 0:
        weights = torch.where(weights >= min_p, weights, 0.0)  # the best weighs 1
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, u * sums[-1], right=True))
    if index == len(sums):  # u so near 1 that rounding ran past the end
        index = int(weights.nonzero()[-1])
    return index if ids is None else int(ids[index])


def _at_least(scaled: Tensor, ids: Tensor | None, threshold: Tensor) -> tuple[Tensor, Tensor]:
    kept = (scaled >= threshold).nonzero()[:, 0]
    return scaled[kept], kept if ids is None else ids[kept]


def _top_p_threshold(scaled: Tensor, top_p: float) -> Tensor:
    """The logit of the last token of the smallest set of best ones whose weights come to `top_p` of all."""
    target = top_p * scaled.double().exp().sum()
    for num_candidates in (*_CANDIDATES, len(scaled)):
        candidates = scaled.topk(min(num_candidates, len(scaled))).values
        sums = candidates.double().exp().cumsum(0)
        if sums[-1] >= target:
            break
    index = min(int(torch.searchsorted(sums, target)), len(sums) - 1)
    return candidates[index]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one token: a pure function, the same in every process.

    Two rounds of splitmix64's finaliser, over the seed and then over the position of the token in prompt and output.
    """
    return (_mix(_mix(seed) ^ (position * 0x9E3779B97F4A7C15)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def position_logprobs(raw: Tensor, token: int, num_best: int) -> PositionLogprobs:
    """raw [V] -> the token's own log probability, then the best ones', and its rank"""
    return score(raw[None], [token], num_best)[0]


def score(raw: Tensor, tokens: Sequence[int], num_best: int) -> list[PositionLogprobs]:
    """raw [R, V], one token for each row -> as `position_logprobs`, row by row"""
    logprobs = raw.double().log_softmax(-1)
    at = torch.tensor(tokens, device=raw.device)[:, None]  # [R, 1]
    own = logprobs.gather(-1, at)[:, 0].tolist()
    ranks = (1 + (raw > raw.gather(-1, at)).sum(-1)).tolist()
    best = logprobs.topk(min(num_best, logprobs.shape[-1]))
    rows = zip(tokens, own, ranks, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        PositionLogprobs(((token, logprob), *zip(ids, values, strict=True)), rank)
        for token, logprob, rank, ids, values in rows
    ]
