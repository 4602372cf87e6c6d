"""A model without weights whose tokens are sampled: its logits are a function of all KV so far."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvasir.engine.grammar_step import GrammarMasks, next_mask
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import sample
from kvasir.engine.step import Sampled, StepPlan
from tests.fakes import VOCAB_SIZE, FakeModelRunner, fake_digest, fake_score


class SamplingRunner(FakeModelRunner):
    """KV as the fake model has it, read back through the block table; logits, and a choice by all rules of sampling."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._masks = GrammarMasks()

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        self.plans.append(plan)
        masks = self._masks.start([one for chunk in plan.chunks for one in chunk.samplers])
        requests: list[Request] = []
        rows: list[Tensor] = []
        drafts: dict[RequestId, list[int]] = {}
        for chunk in plan.chunks:
            digests = self.compute_chunk(chunk)
            logits = [self.logits(digest, chunk.request, i) for i, digest in enumerate(digests) if chunk.samples]
            for one in chunk.samplers:
                requests.append(one)
                rows += logits
                drafts[one.request_id] = one.draft_token_ids[: chunk.num_drafts]
        chosen = sample(torch.stack(rows), requests, masks.result(), drafts) if rows else []
        sampled = {request.request_id: one for request, one in zip(requests, chosen, strict=True)}
        for chunk in plan.chunks:
            if chunk.scored:
                mine = sampled.get(chunk.request.request_id, Sampled())
                scores = tuple(fake_score(chunk.request.prompt_token_ids, i + 1) for i in chunk.scored)
                sampled[chunk.request.request_id] = replace(mine, prompt_logprobs=scores)
        return sampled

    def logits(self, digest: int, request: Request, num_drafts: int) -> Tensor:
        """[V], for the token behind the request's outputs and so many drafts"""
        return fake_logits(digest)


def fake_logits(digest: int, vocabulary: int = VOCAB_SIZE) -> Tensor:
    return 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(digest & (2**63 - 1)))


def say_alone(request: Request, breaks_after: int | None = None) -> Iterator[Sampled]:
    """One token after another, without any cache or batch; for ever. From so many outputs on, the logits are NaN."""
    while True:
        logits = fake_logits(fake_digest(request.token_ids))[None]
        if breaks_after is not None and len(request.output_token_ids) >= breaks_after:
            logits = torch.full_like(logits, torch.nan)
        masks = {request.request_id: next_mask(request)} if request.matcher is not None else {}
        (sampled,) = sample(logits, [request], masks)
        request.output_token_ids += sampled.token_ids
        yield sampled
