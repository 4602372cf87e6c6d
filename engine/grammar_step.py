"""What grammars do in a step: masks while the model computes, one token further after it has."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvasir.common.errors import InvalidRequest
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_row import Mask
from kvasir.engine.step import Sampled

log = logging.getLogger(__name__)

Masks = Mapping[RequestId, Mask | InvalidRequest]


class GrammarMasks:
    """Nothing of a request's grammar is touched elsewhere between `start` and its result."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def start(self, requests: Sequence[Request]) -> "Future[Masks]":
        """The masks of those that have a grammar, for the token that comes after their outputs so far."""
        constrained = [request for request in requests if request.matcher is not None]
        if not constrained:
            nothing: Future[Masks] = Future()
            nothing.set_result({})
            return nothing
        return self._thread.submit(lambda: {request.request_id: next_mask(request) for request in constrained})


def next_mask(request: Request) -> Mask | InvalidRequest:
    """For the token after its outputs, and after those that were taken since."""
    assert request.matcher is not None
    try:
        request.matcher.follow(request.output_token_ids)
        return request.matcher.allowed(request.sampling.stop_token_ids)
    except BaseException as error:  # a panic of the library is no Exception
        return _known(error)


def _known(error: BaseException) -> InvalidRequest:
    """Whatever goes wrong with a grammar is the end of its own request, and of no other."""
    if isinstance(error, InvalidRequest):
        return error
    log.error("a grammar cannot be followed", exc_info=error)
    return InvalidRequest("the grammar cannot be followed")


def taken_by_grammar(request: Request, token_id: int) -> Sampled:
    """One token further; marked where the grammar allows no other after it. Stop tokens are not its affair."""
    assert request.matcher is not None
    if token_id in request.sampling.stop_token_ids:
        return Sampled((token_id,))
    try:
        request.matcher.take(token_id)
        return Sampled((token_id,), completes_grammar=request.matcher.is_complete)
    except BaseException as error:  # a panic of the library is no Exception
        return Sampled(error=_known(error))
