"""From logits to tokens. Each row by itself: what else is in the batch makes no difference to it.

    raw logits -> logit_bias -> penalties -> masks -> greedy: argmax
                                                   -> temperature -> top-k, top-p, min-p -> draw

There is no generator and no state: the draw uses one number made from (seed, position), so a request may be preempted,
moved or recomputed and goes on with the same tokens. And so drafts change nothing either: at each position the request
makes its own choice, after the tokens that it has chosen itself, and a draft that differs is where it ends.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvasir.common.errors import InvalidRequest
from kvasir.engine.grammar_step import Masks, advanced, next_mask
from kvasir.engine.logits import process_logits, processes_logits
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import PositionLogprobs, Sampled
from kvasir.kernels.choose import Draw, choose
from kvasir.kernels.sample import draw_reference

# Shapes: R rows, one a position to be sampled  V vocabulary  K drafts of one request

Drafts = Mapping[RequestId, Sequence[int]]

_ROWS_SCORED_AT_ONCE = 64  # in float64


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    masks: Masks = MappingProxyType({}),
    drafts: Drafts = MappingProxyType({}),
) -> list[Sampled]:
    """logits [R, V], the raw ones: left as they are -> what comes next in each request

    A request has one row, and one more for each of its drafts: the logits after it.
    """
    chosen, finite = _choose_from_raw(logits, requests, drafts)
    sampled, first = [], 0
    rows_scored: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by how many of the best ones are wanted
    for request in requests:
        proposed = drafts.get(request.request_id, ())
        end = first + 1 + len(proposed)
        mask = masks.get(request.request_id)
        one = _choose(logits[first:end], chosen[first:end], finite[first:end], request, proposed, mask)
        if request.sampling.logprobs is not None:
            rows_scored[request.sampling.logprobs] += [(first + i, token) for i, token in enumerate(one.token_ids)]
        sampled.append(one)
        first = end
    return _with_logprobs(logits, requests, sampled, rows_scored) if rows_scored else sampled


def _choose_from_raw(
    logits: Tensor, requests: Sequence[Request], drafts: Drafts
) -> tuple[list[int | None], list[bool]]:
    """logits [R, V] -> each row's token where nothing is done to its logits (None: not known), and if it is finite

    For all rows at once: they are what nearly all requests want.
    """
    draws = [
        Draw()
        if processes_logits(request.sampling, len(request.output_token_ids) + i)
        else _draw_of(request.sampling, request.num_tokens + i)
        for request in requests
        for i in range(1 + len(drafts.get(request.request_id, ())))
    ]
    if logits.device.type == "cpu":
        best, drawn = choose(logits, draws)
        return drawn.tolist(), (best >= 0).tolist()
    # One that is not finite makes the sum so. Both in one tensor: there is one wait for the device.
    tokens, finite = torch.stack((logits.argmax(-1), logits.sum(-1).isfinite().long())).tolist()
    known = [token if draw.temperature == 0 else None for token, draw in zip(tokens, draws, strict=True)]
    return known, list(map(bool, finite))


def _draw_of(params: SamplingParams, position: int) -> Draw:
    """position: of the token, in prompt and output"""
    if params.is_greedy:
        return Draw()
    u = uniform(params.seed, position)
    return Draw(params.temperature, u, params.top_k, params.top_p, params.min_p)


def _choose(
    raw: Tensor, chosen: list[int | None], finite: list[bool], request: Request, drafts: Sequence[int],
    mask: Tensor | InvalidRequest | None,
) -> Sampled:  # fmt: skip
    """raw [1 + K, V]. What goes wrong behind a kept draft is found again in the next step, where it comes first."""
    tokens: list[int] = []
    for i, proposed in enumerate((*drafts, -1)):
        if i and request.matcher is not None:
            mask = next_mask(request)
        one = _choose_token(raw[i], chosen[i], request, tokens, mask) if finite[i] else Sampled((), is_finite=False)
        if not one.token_ids:
            return Sampled(tuple(tokens)) if tokens else one
        token = one.token_ids[0]
        tokens.append(token)
        if token != proposed or one.completes_grammar or token in request.sampling.stop_token_ids:
            break
    return Sampled(tuple(tokens), completes_grammar=one.completes_grammar)


def _choose_token(
    raw: Tensor, chosen: int | None, request: Request, tokens: list[int], mask: Tensor | InvalidRequest | None
) -> Sampled:
    """The request's own choice after its output and `tokens`. raw [V], and what is chosen if they stay as they are"""
    if isinstance(mask, InvalidRequest):
        return Sampled(error=mask)
    params = request.sampling
    num_outputs = len(request.output_token_ids) + len(tokens)
    logits = raw
    if mask is not None or processes_logits(params, num_outputs):
        outputs = request.output_token_ids + tokens if tokens else request.output_token_ids
        logits = process_logits(raw, params, request.prompt_token_ids, outputs, mask)
    if logits is raw and chosen is not None:
        token = chosen
    else:
        token = _token_of(logits, _draw_of(params, len(request.prompt_token_ids) + num_outputs))
    return advanced(request, Sampled((token,)))


def _token_of(logits: Tensor, draw: Draw) -> int:
    """logits [V]; -inf for what must not come"""
    if logits.device.type == "cpu":
        return int(choose(logits[None], [draw], may_hold_bans=True)[1][0])
    return draw_reference(logits, *draw)


def _with_logprobs(
    logits: Tensor,
    requests: Sequence[Request],
    sampled: list[Sampled],
    rows_scored: Mapping[int, list[tuple[int, int]]],
) -> list[Sampled]:
    """logits [R, V]; of the raw ones"""
    scores: dict[int, PositionLogprobs] = {}
    for num_best, wanted in rows_scored.items():
        for start in range(0, len(wanted), _ROWS_SCORED_AT_ONCE):
            rows, tokens = zip(*wanted[start : start + _ROWS_SCORED_AT_ONCE], strict=True)
            scores.update(zip(rows, score(logits[list(rows)], tokens, num_best), strict=True))
    first = iter(sorted(scores))
    return [
        one
        if request.sampling.logprobs is None
        else replace(one, logprobs=tuple(scores[next(first)] for _ in one.token_ids))
        for request, one in zip(requests, sampled, strict=True)
    ]


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


def score(raw: Tensor, tokens: Sequence[int], num_best: int) -> list[PositionLogprobs]:
    """raw [R, V], one token for each row -> its own log probability, then the best ones', and its rank; row by row"""
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
