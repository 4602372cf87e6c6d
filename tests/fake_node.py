"""A node without an engine: a real gRPC server that speaks the session protocol, with tokens from a hash.

The next token depends on every token before it and on the seed, so a router that loses, repeats or reorders one, or
continues with the wrong seed, gets other tokens from there on. What a prefill node publishes lies in a `Fabric` that
the decode nodes of the same test fetch from; a block of a node that has died cannot be fetched any more.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc.aio

from kvasir.common.grpc_server import bind, new_server
from kvasir.common.seeds import sequence_seed
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc

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


class Fabric:
    """Where published blocks can be fetched: transfer id -> how many, while their node lives."""

    def __init__(self) -> None:
        self.num_blocks: dict[str, int] = {}
        self.owner: dict[str, FakeNode] = {}

    def publish(self, transfer_id: str, num_blocks: int, owner: FakeNode) -> None:
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


class FakeNode:
    """`async with FakeNode(Role, fabric) as node`. Counters say what has happened to it."""

    def __init__(self, role: str, fabric: Fabric, **behaviour: Any) -> None:
        self.role = role
        self.fabric = fabric
        self.behaviour = Behaviour(**behaviour)
        self.epoch = uuid.uuid4().hex
        self.address = ""
        self.is_alive = False
        self.is_frozen = False
        self.sessions: dict[str, FakeSession] = {}
        self.leased: dict[tuple[str, int], str] = {}  # (session, handle) -> transfer id
        self.num_started = 0
        self.num_cancelled = 0
        self.num_sequences_cancelled = 0
        self.num_tokens_prefilled = 0
        self.num_tokens_recomputed = 0
        self.num_blocks_fetched = 0
        self.num_resumed = 0
        self.num_snapshots_asked = 0
        self.started: list[FakeRequest] = []
        self._compute = asyncio.Lock()
        self._server: grpc.aio.Server | None = None

    # --- life --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeNode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self._server = new_server(listen, None)
        if self.role == "prefill":
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, listen)}"
        await self._server.start()
        self.is_alive = True

    async def die(self) -> None:
        """As by kill -9: streams break, nothing is said."""
        self.is_alive = False
        for session in self.sessions.values():
            session.end()
        self.sessions.clear()
        self.leased.clear()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=None)

    async def restart(self) -> None:
        """The same address, another process."""
        address = self.address
        await self.die()
        self.epoch = uuid.uuid4().hex
        self.is_frozen = False
        await self.start(address)

    async def announce(self, registry_address: str) -> registry_pb2.AnnounceResponse:
        async with grpc.aio.insecure_channel(registry_address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            request = registry_pb2.AnnounceRequest(address=self.address, node=self.description())
            answer: registry_pb2.AnnounceResponse = await stub.Announce(request, timeout=10)
            return answer

    # --- what it shows -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[FakeRequest]:
        return [request for session in self.sessions.values() for request in session.requests.values()]

    @property
    def num_free_blocks(self) -> int:
        return self.behaviour.num_blocks - sum(one.num_blocks(self.behaviour.block_size) for one in self.requests)

    def description(self) -> common_pb2.NodeDescription:
        behaviour = self.behaviour
        return common_pb2.NodeDescription(
            role=common_pb2.ROLE_PREFILL if self.role == "prefill" else common_pb2.ROLE_DECODE,
            node_epoch=self.epoch,
            model_name="fake",
            kv_identity=behaviour.model,
            block_size=behaviour.block_size,
            num_kv_heads=2,
            vocab_size=VOCAB_SIZE,
            max_model_len=behaviour.max_model_len,
            max_num_seqs=behaviour.max_num_seqs,
            num_total_blocks=behaviour.num_blocks,
            max_num_batched_tokens=behaviour.chunk_tokens,
            connector=behaviour.connector,
            kv_endpoint=behaviour.endpoint if self.role == "prefill" else "",
        )

    def _heartbeat(self, session: FakeSession) -> common_pb2.SessionEvent:
        is_prefill = self.role == "prefill"
        load = common_pb2.NodeLoad(
            num_running=len(self.requests),
            num_free_blocks=max(0, self.num_free_blocks),
            num_total_blocks=self.behaviour.num_blocks,
            num_queued_tokens=sum(len(one.prompt) for one in self.requests) if is_prefill else 0,
        )
        heartbeat = common_pb2.Heartbeat(
            engine_age_s=self.behaviour.engine_age_s,
            load=load,
            draining=self.behaviour.is_draining,
            last_command=session.last_command,
        )
        return common_pb2.SessionEvent(heartbeat=heartbeat)

    # --- the service -------------------------------------------------------------------------------------------

    async def Describe(self, request: Any, context: Any) -> common_pb2.DescribeResponse:
        return common_pb2.DescribeResponse(node=self.description())

    async def Drain(self, request: Any, context: Any) -> common_pb2.DrainResponse:
        self.behaviour.is_draining = True
        return common_pb2.DrainResponse(num_in_flight=len(self.requests))

    async def Session(self, commands: AsyncIterator[Any], context: Any) -> None:
        opening = (await anext(commands)).open
        session, resumed = self._session(opening)
        opened = common_pb2.SessionOpened(node_epoch=self.epoch, resumed=resumed, last_command=session.last_command)
        await context.write(common_pb2.SessionEvent(opened=opened))
        reader = asyncio.create_task(self._read(session, commands))
        try:
            await self._write(session, context, opening.last_event if resumed else 0, reader)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _session(self, opening: common_pb2.OpenSession) -> tuple[FakeSession, bool]:
        if opening.session_id in self.sessions:
            self.num_resumed += 1
            return self.sessions[opening.session_id], True
        router = opening.session_id.partition("/")[0]
        for session_id in [one for one in self.sessions if one.partition("/")[0] == router]:
            self.sessions.pop(session_id).end()
            self.leased = {lease: ticket for lease, ticket in self.leased.items() if lease[0] != session_id}
        self.sessions[opening.session_id] = FakeSession(opening.session_id)
        return self.sessions[opening.session_id], False

    async def _write(self, session: FakeSession, context: Any, num_written: int, reader: asyncio.Task[None]) -> None:
        while not reader.done():
            while self.is_frozen:
                await asyncio.sleep(0.02)
            await context.write(self._heartbeat(session))
            session.changed.clear()
            while num_written < len(session.events) and not self.is_frozen:
                await context.write(session.events[num_written])
                num_written += 1
            try:
                async with asyncio.timeout(self.behaviour.heartbeat_s):
                    await session.changed.wait()
            except TimeoutError:
                pass

    async def _read(self, session: FakeSession, commands: AsyncIterator[Any]) -> None:
        async for command in commands:
            while self.is_frozen:
                await asyncio.sleep(0.02)
            if command.number:
                if command.number <= session.last_command:
                    continue
                assert command.number == session.last_command + 1, "a command was lost"
                session.last_command = command.number
            self._obey(session, command)

    def _obey(self, session: FakeSession, command: Any) -> None:
        kind = command.WhichOneof("command")
        if kind == "acknowledge":
            session.num_acknowledged = max(session.num_acknowledged, command.acknowledge.last_event)
        elif kind == "start":
            self._start(session, command.start)
        elif kind == "snapshot":
            self.num_snapshots_asked += 1
        elif kind == "release":
            self._release(session, command.release.handle)
        elif kind == "cancel":
            cancel = command.cancel
            self._cancel(session, cancel.handle, cancel.sequence if cancel.HasField("sequence") else None)
        elif kind == "continue_decode":
            request = session.requests.get(command.continue_decode.handle)
            if request is not None:
                for first in command.continue_decode.first:
                    request.outputs[first.sequence].extend(unpack_tokens(first.token_ids))
                request.continued.set_result(None)
        elif kind == "progress":
            request = session.requests.get(command.progress.progress.handle)
            if request is not None:
                request.progress = command.progress.progress.num_blocks
                request.is_committed = command.progress.progress.committed
                request.moved.set()
        elif kind == "abort_transfer":
            request = session.requests.get(command.abort_transfer.handle)
            if request is not None:
                request.is_aborted = True
                request.moved.set()

    def _start(self, session: FakeSession, start: Any) -> None:
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

    def _cancel(self, session: FakeSession, handle: int, sequence: int | None) -> None:
        if sequence is not None and handle in session.requests:
            self.num_sequences_cancelled += sequence in session.requests[handle].open
            session.requests[handle].open.discard(sequence)
            if session.requests[handle].open:
                return
        self._release(session, handle)
        request = session.requests.pop(handle, None)
        if request is not None and request.task is not None:
            self.num_cancelled += self._counts(request)
            request.task.cancel()

    def _release(self, session: FakeSession, handle: int) -> None:
        transfer_id = self.leased.pop((session.session_id, handle), None)
        if transfer_id is not None:
            self.fabric.release(transfer_id)

    # --- the work ----------------------------------------------------------------------------------------------

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
