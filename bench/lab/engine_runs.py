"""Requests to an engine in this process."""

from collections.abc import Sequence
from typing import Any

from kvasir.engine.engine import Engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams


def new_request(name: object, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Request:
    """Greedy, unless `sampling` says something else; to its full length, for no token stops it."""
    return Request(
        request_id=RequestId(str(name)),
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, **sampling),
    )


def new_requests(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    return [new_request(number, prompt, num_tokens) for number, prompt in enumerate(prompts)]


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
