"""Our engine with a codec between its prefill and its decode, all in this process.

A prompt is computed and handed off block by block; each block goes through what it goes through between two nodes:
encode, header and checksum, verify, decode, its place in the cache. Then it is decoded from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from kvasir.bench.lab.bare_model import BLOCK_SIZE, BareModel
from kvasir.bench.lab.engine_runs import new_requests, run_to_end, submit_all
from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.kv_connector.base import BlockHeader, BlockKey, Frame
from kvasir.kv_connector.codec import decode, encode
from kvasir.kv_connector.forms import is_exact
from kvasir.kv_connector.header import Expected, checksum_of, pack, verify

_IDENTITY, _KEY = bytes(32), BlockKey(bytes(32))


@dataclass(eq=False)
class Prefilled:
    """A prompt that has been computed: its blocks as bytes, copied out of the cache, and the first token."""

    prompt: list[int]
    blocks: list[bytes] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # of each block
    first_token: int = -1


class CodecLab:
    def __init__(self, model: Path, num_blocks: int) -> None:
        self._model = BareModel(model)
        self._cache = self._model.new_cache(num_blocks)
        self.layout = self._cache.layout

    def _engine(self, num_seqs: int) -> Engine:
        limits = Limits(
            block_size=BLOCK_SIZE,
            num_blocks=self._cache.num_blocks,
            max_num_batched_tokens=512,
            max_num_seqs=num_seqs,
            max_model_len=self._model.max_position,
            watermark=0,
            enable_prefix_caching=False,
        )
        return Engine(Scheduler(limits), ModelRunner(self._model.model, self._cache, limits.max_model_len))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefilled]:
        done = {RequestId(str(i)): Prefilled(list(prompt)) for i, prompt in enumerate(prompts)}
        engine = self._engine(num_seqs=1)  # one after the other: each gives its blocks back before the next
        for request_id, prefilled in done.items():
            engine.submit(Request(request_id=request_id, prompt_token_ids=prefilled.prompt, hand_off=True))
        while engine.has_work:
            result = engine.step()
            for report in result.computed:
                prefilled = done[report.request_id]
                prefilled.blocks += [bytes(self._cache.read(block)) for block in report.block_ids]
                prefilled.num_tokens += report.num_tokens
                engine.release_blocks(report.block_ids)
            for output in result.outputs:
                done[output.request_id].first_token = output.token_ids[0]
        return list(done.values())

    def generate_here(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, all of it computed by one engine: what the others are held against."""
        requests = new_requests(prompts, num_tokens)
        engine = self._engine(len(requests))
        run_to_end(engine, requests)
        return [request.output_token_ids for request in requests]

    def generate_from(self, prefilled: Sequence[Prefilled], codec: str, num_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, whose blocks have gone through the codec."""
        requests = new_requests([one.prompt for one in prefilled], num_tokens)
        engine = self._engine(len(requests))
        for request in requests:
            request.awaits |= {"blocks", "continue"}
        submit_all(engine, requests)
        while any(request.phase is Phase.WAITING for request in requests):
            engine.step()
        for request, one in zip(requests, prefilled, strict=True):
            for index, block in enumerate(one.blocks):
                self._land(codec, block, one.num_tokens[index], request.block_table[index])
                engine.block_loaded(request.request_id, index, is_exact(codec, self.layout, self.layout))
            engine.loading_done(request.request_id)
            engine.continue_with(request.request_id, [one.first_token])
        while engine.has_work:
            engine.step()
        return [request.output_token_ids for request in requests]

    def next_token_logits(self, prefilled: Prefilled, codec: str, continuation: Sequence[int]) -> Tensor:
        """[len(continuation), V]: after the prompt's blocks have gone through the codec, and these tokens behind it."""
        token_ids = [*prefilled.prompt, *continuation]
        for index, block in enumerate(prefilled.blocks):
            self._land(codec, block, prefilled.num_tokens[index], BlockId(index))
        batch = self._model.batch(len(prefilled.prompt), [token_ids])
        return self._model.logits(self._model.hidden(batch, self._cache))

    def _land(self, codec: str, block: bytes, num_tokens: int, place: BlockId) -> None:
        payload = encode(codec, memoryview(block), self.layout)
        header = header_of(codec, payload, self.layout, num_tokens, checksum_of(payload))
        expected = Expected(kv_identity=_IDENTITY, layout=self.layout, key=_KEY, num_tokens=num_tokens)
        verified = verify(Frame(pack(header), payload), expected)
        self._cache.write(place, decode(verified, payload, self.layout))


def header_of(codec: str, payload: memoryview, layout: KVLayout, num_tokens: int, checksum: int = 0) -> BlockHeader:
    return BlockHeader(
        kv_identity=_IDENTITY,
        layout=layout,
        key=_KEY,
        num_tokens=num_tokens,
        payload_bytes=payload.nbytes,
        checksum=checksum,
        sender_epoch="lab",
        codec=codec,
    )
