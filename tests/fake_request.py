"""A request on a node without an engine: its tokens come from a hash.

The next token depends on every token before it and on the seed, so a router that loses, repeats or reorders one, or
continues with the wrong seed, gets other tokens from there on.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from kvasir.common.seeds import sequence_seed
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import common_pb2

VOCAB_SIZE = 1000
BLOCK_SIZE = 16


def next_token(token_ids: Sequence[int], seed: int) -> int:
    digest = sha256(pack_tokens(token_ids) + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


class FakeRequest:
    """One handle on one node."""

    def __init__(self, handle: int, request: common_pb2.GenerationRequest, ticket: common_pb2.Ticket | None) -> None:
        self.handle = handle
        self.request = request
        self.transfer_id = ticket.transfer_id if ticket is not None else None
        self.prompt = list(unpack_tokens(request.prompt_token_ids))
        self.outputs: list[list[int]] = [[] for _ in range(request.num_sequences)]
        for sequence, packed in enumerate(request.output_token_ids):
            self.outputs[sequence] += unpack_tokens(packed)
        self.open = set(range(request.num_sequences))
        self.progress = 0
        self.is_committed = False
        self.is_aborted = False
        self.continued: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.moved = asyncio.Event()  # progress, or an abort
        self.task: asyncio.Task[None] | None = None

    @property
    def is_canary(self) -> bool:
        return self.request.request_id.startswith("canary-")

    @property
    def token_ids(self) -> list[int]:
        """That are known before anything is sampled here; several sequences have nothing but the prompt in common."""
        return self.prompt + (self.outputs[0] if len(self.outputs) == 1 else [])

    def num_blocks(self, block_size: int) -> int:
        return -(-len(self.token_ids) // block_size)

    def sample(self, sequence: int) -> tuple[int, int]:
        """The next token, and how it ends the sequence."""
        sampling, outputs = self.request.sampling, self.outputs[sequence]
        token = next_token(self.prompt + outputs, sequence_seed(sampling.seed, sequence))
        outputs.append(token)
        if token in unpack_tokens(sampling.stop_token_ids):
            return token, common_pb2.FINISH_REASON_STOP
        if len(outputs) >= sampling.max_tokens:
            return token, common_pb2.FINISH_REASON_LENGTH
        return token, common_pb2.FINISH_REASON_UNSPECIFIED


class FakeSession:
    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.events: list[common_pb2.SessionEvent] = []
        self.num_acknowledged = 0
        self.last_command = 0
        self.changed = asyncio.Event()
        self.requests: dict[int, FakeRequest] = {}

    def tell(self, **event: Any) -> None:
        self.events.append(common_pb2.SessionEvent(number=len(self.events) + 1, **event))
        self.changed.set()

    def end(self) -> None:
        for request in self.requests.values():
            if request.task is not None:
                request.task.cancel()
        self.requests.clear()
