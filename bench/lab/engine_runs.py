"""Requests to an engine in this process, and chunks for a step without one."""

from collections.abc import Sequence
from typing import Any

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Chunk


def new_request(name: object, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Request:
    """Greedy, unless `sampling` says something else; to its full length, for no token stops it."""
    return Request(
        request_id=RequestId(str(name)),
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, **sampling),
    )


def submit_all(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)


def run_until_all_decode(engine: Engine, requests: Sequence[Request]) -> None:
    submit_all(engine, requests)
    while not all(request.output_token_ids for request in requests):
        engine.step()


def run_to_end(engine: Engine, requests: Sequence[Request]) -> None:
    submit_all(engine, requests)
    while engine.has_work:
        engine.step()


def chunk_behind(start: int, number: int, token_ids: Sequence[int], num_blocks: int) -> Chunk:
    """The tokens behind `start`, of a sequence that has `num_blocks` blocks, as all those with lower numbers have."""
    table = [BlockId(number * num_blocks + i) for i in range(num_blocks)]
    request = Request(request_id=RequestId(str(number)), prompt_token_ids=list(token_ids), block_table=table)
    return Chunk(request, start, len(token_ids) - start)
