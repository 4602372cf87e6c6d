"""Runs a step's plan: one forward pass over all its tokens, then one token for each request that is due one."""

from concurrent.futures import Future
from dataclasses import replace
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from kvasir.engine.batch import HostBatch, decodes_first, host_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_graphs import Capture
from kvasir.engine.cuda_sampler import logits_of, sample_on_device, samples_on_device
from kvasir.engine.forward_pass import ForwardPass, Model
from kvasir.engine.grammar_step import GrammarMasks, Masks
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import ROWS_SCORED_AT_ONCE, sample, score
from kvasir.engine.step import Chunk, PositionLogprobs, Sampled, StepPlan

# Shapes: T tokens in this step  C hidden size


class Followers(Protocol):
    """The other ranks of a model that is cut: they do what this one does, at the same time."""

    def forward(self, batch: HostBatch) -> None: ...

    def capture_decodes(self) -> None: ...


class ModelRunner:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: Model, kv_cache: KVCache, max_model_len: int, followers: Followers | None = None) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.data.device
        self._max_model_len = max_model_len
        self._forward = ForwardPass(model, kv_cache.data, kv_cache.layout.block_size, max_model_len)
        self._followers = followers
        self._grammar_masks = GrammarMasks()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        """Waits for a GPU once, for the tokens; twice or more where logprobs or grammars ask for it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: kernels are launched there
        chunks = decodes_first(plan)
        batch = host_batch(chunks, self._kv_cache.layout.block_size)
        masks = self._grammar_masks.start([one for chunk in chunks for one in chunk.samplers])
        self._kv_cache.join()
        if self._followers is not None:
            self._followers.forward(batch)
        hidden, sampled_tokens = self._forward(batch)
        self._kv_cache.mark()
        sampled = self._score(chunks, hidden, self._sample(chunks, sampled_tokens, hidden, masks))
        if not sampled:
            self._kv_cache.wait()  # a step ends when it is computed: its blocks are final, and its time is known
        return sampled

    def capture_decodes(self, max_num_seqs: int, capture: Capture, num_drafts: int = 0) -> None:
        """From now on, steps of decodes alone, with or without drafts, are replayed."""
        if self._followers is not None:
            self._followers.capture_decodes()
        self._forward.capture_decodes(max_num_seqs, num_drafts, capture)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self._kv_cache.copy(source, target)

    def _sample(
        self, chunks: list[Chunk], sampled_tokens: Tensor, hidden: Tensor, masks: "Future[Masks]"
    ) -> dict[RequestId, Sampled]:
        """hidden [T, C], sampled_tokens [R]; requests that sample from one chunk get the very same logits"""
        if not len(sampled_tokens):
            return {}
        logits = self._model.logits(hidden[sampled_tokens])
        requests: list[Request] = []
        rows: list[int] = []
        drafts: dict[RequestId, list[int]] = {}
        first = 0
        for chunk in chunks:
            end = first
            for request in chunk.samplers:
                end = first + 1 + chunk.num_drafts
                requests.append(request)
                rows += range(first, end)
                if chunk.num_drafts:
                    drafts[request.request_id] = request.draft_token_ids[: chunk.num_drafts]
            first = end
        if len(rows) > len(logits):
            logits = logits_of(logits, rows)
        choose = sample_on_device if samples_on_device(logits) else sample
        sampled = choose(logits, requests, masks.result(), drafts)
        return {request.request_id: one for request, one in zip(requests, sampled, strict=True)}

    def _score(
        self, chunks: list[Chunk], hidden: Tensor, sampled: dict[RequestId, Sampled]
    ) -> dict[RequestId, Sampled]:
        """hidden [T, C]; with the logprobs of prompts, a few rows of logits at a time"""
        end_in_batch = 0
        for chunk in chunks:
            end_in_batch += chunk.num_tokens
            positions = chunk.scored
            if not positions:
                continue
            request = chunk.request
            first = end_in_batch - chunk.end  # the row of position 0, if it were in this step
            logprobs: list[PositionLogprobs] = []
            for start in range(positions.start, positions.stop, ROWS_SCORED_AT_ONCE):
                end = min(start + ROWS_SCORED_AT_ONCE, positions.stop)
                logits = self._model.logits(hidden[first + start : first + end])
                tokens = request.prompt_token_ids[start + 1 : end + 1]
                logprobs += score(logits, tokens, request.sampling.prompt_logprobs or 0)
            mine = sampled.get(request.request_id, Sampled())
            is_finite = mine.is_finite and all(isfinite(one.entries[0][1]) for one in logprobs)
            sampled[request.request_id] = replace(mine, prompt_logprobs=tuple(logprobs), is_finite=is_finite)
        return sampled

    def warm_up(self) -> None:
        """Compile and choose the kernels before the first request waits for it. Writes into the first block."""
        num_tokens = min(4, self._kv_cache.layout.block_size, self._max_model_len)
        request = Request(request_id=RequestId("warm-up"), prompt_token_ids=[0] * num_tokens, block_table=[BlockId(0)])
        last = request.num_tokens - 1
        for chunk in (Chunk(request, 0, request.num_tokens), Chunk(request, last, 1)):
            self.execute(StepPlan((chunk,)))
