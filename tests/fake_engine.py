"""What a fake node computes, and where its blocks lie.

What a prefill node publishes lies in a `Fabric` that the decode nodes of the same test fetch from; a block of a node
that has died cannot be fetched any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kvasir.common.tokens import pack_tokens
from kvasir.proto import common_pb2
from tests.fake_request import BLOCK_SIZE, FakeRequest, FakeSession


class Fabric:
    """Where published blocks can be fetched: transfer id -> how many, while their node lives."""

    def __init__(self) -> None:
        self.num_blocks: dict[str, int] = {}
        self.owner: dict[str, FakeEngine] = {}

    def publish(self, transfer_id: str, num_blocks: int, owner: FakeEngine) -> None:
        self.num_blocks[transfer_id] = num_blocks
        self.owner[transfer_id] = owner

    def can_fetch(self, transfer_id: str, index: int) -> bool:
        return index < self.num_blocks.get(transfer_id, 0) and self.owner[transfer_id].is_alive

    def release(self, transfer_id: str) -> None:
        self.num_blocks.pop(transfer_id, None)


@dataclass(kw_only=True)
class Behaviour:
    """All of it may be changed while the node runs."""

    chunk_tokens: int = 64
    chunk_s: float = 0.0  # a prefill chunk takes so long
    fetch_s: float = 0.0  # a block's way takes so long
    token_s: float = 0.0
    most_tokens: int | None = None  # a request stands still with so many of each sequence, until there may be more
    num_blocks: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 4096
    connector: str = "memory"
    endpoint: str = "memory:1"
    model: bytes = b"model-a"
    block_size: int = BLOCK_SIZE
    engine_age_s: float = 0.0
    is_draining: bool = False
    heartbeat_s: float = 0.1
    minds_canaries: bool = False  # True: counts them, and fails their starts as any other's
    fail_starts: list[int] = field(default_factory=list)  # a FailureCode each, used up by as many starts


class FakeEngine:
    """What one node computes for all of its sessions. Counters say what has happened to it."""

    def __init__(self, role: str, fabric: Fabric, **behaviour: Any) -> None:
        self.role = role
        self.fabric = fabric
        self.behaviour = Behaviour(**behaviour)
        self.is_alive = False
        self.sessions: dict[str, FakeSession] = {}
        self.leased: dict[tuple[str, int], str] = {}  # (session, handle) -> transfer id
        self.num_started = 0
        self.num_cancelled = 0
        self.num_sequences_cancelled = 0
        self.num_tokens_prefilled = 0
        self.num_tokens_recomputed = 0
        self.num_blocks_fetched = 0
        self.started: list[FakeRequest] = []
        self._compute = asyncio.Lock()

    @property
    def requests(self) -> list[FakeRequest]:
        return [request for session in self.sessions.values() for request in session.requests.values()]

    @property
    def num_free_blocks(self) -> int:
        return self.behaviour.num_blocks - sum(one.num_blocks(self.behaviour.block_size) for one in self.requests)

    def begin(self, session: FakeSession, start: Any) -> None:
        ticket = start.ticket if start.HasField("ticket") else None
        request = FakeRequest(start.handle, start.request, ticket)
        code = None
        if self._counts(request):
            self.num_started += 1
            self.started.append(request)
            code = self.behaviour.fail_starts.pop(0) if self.behaviour.fail_starts else None
        if code is None and request.num_blocks(self.behaviour.block_size) > self.num_free_blocks:
            code = common_pb2.FAILURE_CODE_OVERLOADED
        if code is not None:
            self.fail(session, request.handle, code)
            return
        session.requests[request.handle] = request
        work = self._prefill if self.role == "prefill" else self._decode
        request.task = asyncio.create_task(work(session, request))

    def _counts(self, request: FakeRequest) -> bool:
        return self.behaviour.minds_canaries or not request.is_canary

    def fail(self, session: FakeSession, handle: int, code: int) -> None:
        failed = common_pb2.RequestFailed(handle=handle, code=code, message="as the test wants it")  # type: ignore[arg-type]
        session.tell(failed=failed)
        request = session.requests.pop(handle, None)
        if request is not None and request.task is not None:
            request.task.cancel()

    def cancel(self, session: FakeSession, handle: int, sequence: int | None) -> None:
        if sequence is not None and handle in session.requests:
            self.num_sequences_cancelled += sequence in session.requests[handle].open
            session.requests[handle].open.discard(sequence)
            if session.requests[handle].open:
                return
        self.release(session, handle)
        request = session.requests.pop(handle, None)
        if request is not None and request.task is not None:
            self.num_cancelled += self._counts(request)
            request.task.cancel()

    def release(self, session: FakeSession, handle: int) -> None:
        transfer_id = self.leased.pop((session.session_id, handle), None)
        if transfer_id is not None:
            self.fabric.release(transfer_id)

    async def _prefill(self, session: FakeSession, request: FakeRequest) -> None:
        assert request.transfer_id is not None
        async with self._compute:
            self.leased[session.session_id, request.handle] = request.transfer_id
            session.tell(step=common_pb2.StepOutput(admitted=[common_pb2.RequestAdmitted(handle=request.handle)]))
            num_tokens = len(request.token_ids)
            num_computed = 0
            while num_computed < num_tokens:
                await asyncio.sleep(self.behaviour.chunk_s)
                num_new = min(self.behaviour.chunk_tokens, num_tokens - num_computed)
                num_computed += num_new
                self.num_tokens_prefilled += num_new * self._counts(request)
                is_last = num_computed == num_tokens
                num_blocks = request.num_blocks(self.behaviour.block_size)
                done = num_blocks if is_last else num_computed // self.behaviour.block_size
                self.fabric.publish(request.transfer_id, done, self)
                progress = common_pb2.TicketProgress(handle=request.handle, num_blocks=done, committed=is_last)
                session.tell(step=common_pb2.StepOutput(progress=[progress]))
        del session.requests[request.handle]
        outputs = []
        for sequence in sorted(request.open):
            token, reason = request.sample(sequence)
            if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
                reason = common_pb2.FINISH_REASON_HANDED_OFF
            outputs.append(self._output(request, sequence, token, reason))
        scores = self._scores(request)
        session.tell(step=common_pb2.StepOutput(outputs=outputs, prompt_logprobs=scores))

    async def _decode(self, session: FakeSession, request: FakeRequest) -> None:
        session.tell(step=common_pb2.StepOutput(admitted=[common_pb2.RequestAdmitted(handle=request.handle)]))
        if request.transfer_id is not None:
            await self._fetch(session, request, request.transfer_id)
        else:
            self.num_tokens_recomputed += len(request.token_ids) * self._counts(request)
        await request.continued
        scores = self._scores(request)
        while request.open:
            await asyncio.sleep(self.behaviour.token_s)
            if self.behaviour.most_tokens is not None and len(request.outputs[0]) >= self.behaviour.most_tokens:
                await asyncio.sleep(0.001)
                continue
            outputs = []
            for sequence in sorted(request.open):
                token, reason = request.sample(sequence)
                if reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                    request.open.remove(sequence)
                outputs.append(self._output(request, sequence, token, reason))
            if not request.open:
                del session.requests[request.handle]
            session.tell(step=common_pb2.StepOutput(outputs=outputs, prompt_logprobs=scores))
            scores = []

    async def _fetch(self, session: FakeSession, request: FakeRequest, transfer_id: str) -> None:
        num_tokens = len(request.token_ids)
        num_blocks = request.num_blocks(self.behaviour.block_size)
        num_fetched = 0
        while num_fetched < num_blocks and not request.is_aborted:
            if num_fetched >= request.progress:
                request.moved.clear()
                await request.moved.wait()
                continue
            await asyncio.sleep(self.behaviour.fetch_s)
            if not self.fabric.can_fetch(transfer_id, num_fetched):
                break
            num_fetched += 1
            self.num_blocks_fetched += self._counts(request)
        num_missing = max(0, num_tokens - num_fetched * self.behaviour.block_size)
        self.num_tokens_recomputed += num_missing * self._counts(request)
        report = common_pb2.TransferReport(
            handle=request.handle, num_blocks_fetched=num_fetched, num_tokens_recomputed=num_missing
        )
        session.tell(step=common_pb2.StepOutput(transfers=[report]))

    def _output(self, request: FakeRequest, sequence: int, token: int, reason: int) -> common_pb2.SequenceOutput:
        return common_pb2.SequenceOutput(
            handle=request.handle,
            sequence=sequence,
            token_ids=pack_tokens([token]),
            finish_reason=reason,  # type: ignore[arg-type]
        )

    def _scores(self, request: FakeRequest) -> list[common_pb2.PromptLogprobs]:
        """Token `t` has the logprob -t."""
        if not request.request.sampling.HasField("prompt_logprobs"):
            return []
        entries = [common_pb2.TokenLogprob(token_id=token, logprob=-token) for token in request.prompt[1:]]
        positions = [common_pb2.PositionLogprobs(entries=[entry], rank=1) for entry in entries]
        return [common_pb2.PromptLogprobs(handle=request.handle, first_position=1, positions=positions)]
