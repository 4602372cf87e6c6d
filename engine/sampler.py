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
from kvasir.engine.grammar_step import Masks, next_mask, taken_by_grammar
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_row import Mask, SamplingRow, rows_of
from kvasir.engine.step import PositionLogprobs, Sampled
from kvasir.kernels.choose import choose

# Shapes: R rows, one a position to be sampled  V vocabulary  K drafts of one request

Drafts = Mapping[RequestId, Sequence[int]]

ROWS_SCORED_AT_ONCE = 64  # in float64: those of a long prompt would take gigabytes
_NOT_FINITE = Sampled(is_finite=False)


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    masks: Masks = MappingProxyType({}),
    drafts: Drafts = MappingProxyType({}),
) -> list[Sampled]:
    """logits [R, V], the raw ones: left as they are -> what comes next in each request

    A request has one row, and one more for each of its drafts: the logits after it.
    """
    proposals = [drafts.get(request.request_id, ()) for request in requests]
    first_masks = [masks.get(request.request_id) for request in requests]
    rows: list[SamplingRow] = []
    for request, proposed, mask in zip(requests, proposals, first_masks, strict=True):
        rows += rows_of(request, proposed, None if isinstance(mask, InvalidRequest) else mask)
    tokens = _choose(logits, rows)
    sampled, first = [], 0
    rows_scored: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by how many of the best ones are wanted
    for request, proposed, mask in zip(requests, proposals, first_masks, strict=True):
        mine = slice(first, first + 1 + len(proposed))
        if request.matcher is None:
            one = taken(request, proposed, tokens[mine])
        elif isinstance(mask, InvalidRequest):
            one = Sampled(error=mask)
        else:
            one = _taken_one_by_one(request, proposed, tokens[first], logits[mine])
        if request.sampling.logprobs is not None:
            rows_scored[request.sampling.logprobs] += [(first + i, token) for i, token in enumerate(one.token_ids)]
        sampled.append(one)
        first = mine.stop
    return _with_logprobs(logits, requests, sampled, rows_scored) if rows_scored else sampled


def taken(request: Request, proposed: Sequence[int], tokens: Sequence[int]) -> Sampled:
    """Drafts are kept up to the first that the request would not have chosen; its own choice comes in its place.

    tokens: what it chooses at each position if the drafts before are kept, -1 where the logits are not finite
    """
    taken: list[int] = []
    for token, draft in zip(tokens, (*proposed, -1), strict=True):
        if token < 0:  # if not the first, it is found again in the next step, where it comes first
            return Sampled(tuple(taken)) if taken else _NOT_FINITE
        taken.append(token)
        if token != draft or token in request.sampling.stop_token_ids:
            break
    return Sampled(tuple(taken))


def _taken_one_by_one(request: Request, proposed: Sequence[int], token: int, logits: Tensor) -> Sampled:
    """The same, where what may come is known only when the token before it is taken. logits [1 + K, V]

    token: what it chooses first
    """
    taken: list[int] = []
    for i, draft in enumerate((*proposed, -1)):
        if i:
            mask = next_mask(request)
            if isinstance(mask, InvalidRequest):  # this too is found again, with the kept drafts
                return Sampled(tuple(taken))
            token = _choose(logits[i : i + 1], [_row_behind(request, taken, mask)])[0]
        one = taken_by_grammar(request, token) if token >= 0 else _NOT_FINITE
        if not one.token_ids:
            return Sampled(tuple(taken)) if taken else one
        taken.append(token)
        if token != draft or one.completes_grammar or token in request.sampling.stop_token_ids:
            break
    return replace(one, token_ids=tuple(taken))


def _row_behind(request: Request, tokens: list[int], allowed: Mask) -> SamplingRow:
    outputs = request.output_token_ids + tokens
    return SamplingRow(params=request.sampling, prompt=request.prompt_token_ids, outputs=outputs, allowed=allowed)


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """logits [R, V] -> each row's token; -1 where they are not finite"""
    changes = ((r, row.change(logits.shape[-1])) for r, row in enumerate(rows))
    tokens: list[int] = choose(
        logits, [row.draw for row in rows], {r: change for r, change in changes if change is not None}
    )[1].tolist()
    return tokens


def _with_logprobs(
    logits: Tensor,
    requests: Sequence[Request],
    sampled: list[Sampled],
    rows_scored: Mapping[int, list[tuple[int, int]]],
) -> list[Sampled]:
    """logits [R, V]; of the raw ones"""
    scores: dict[int, PositionLogprobs] = {}
    for num_best, wanted in rows_scored.items():
        for start in range(0, len(wanted), ROWS_SCORED_AT_ONCE):
            rows, tokens = zip(*wanted[start : start + ROWS_SCORED_AT_ONCE], strict=True)
            scores.update(zip(rows, score(logits[list(rows)], tokens, num_best), strict=True))
    first = iter(sorted(scores))
    return [
        one
        if request.sampling.logprobs is None
        else replace(one, logprobs=tuple(scores[next(first)] for _ in one.token_ids))
        for request, one in zip(requests, sampled, strict=True)
    ]


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
