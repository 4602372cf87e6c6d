"""A step's plan in the making."""

from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Admitted, Chunk


class OpenPlan:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_prompts = 0  # that are still to be considered
        self.held_back: set[RequestId] = set()  # prompts with seats that neither begin nor go on: enough others have
        self.chunks: dict[RequestId, Chunk] = {}
        self.admitted: list[Admitted] = []

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.request.request_id] = chunk
        self.budget -= chunk.num_tokens

    def drop(self, request: Request) -> None:
        chunk = self.chunks.pop(request.request_id, None)
        self.budget += chunk.num_tokens if chunk else 0

    def completes(self, request: Request) -> bool:
        """Nothing of it is left to be computed after this step."""
        chunk = self.chunks.get(request.request_id)
        return chunk is not None and chunk.samples
