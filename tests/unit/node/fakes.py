"""Nodes without torch: a real engine, a real connector, and a model whose whole state is in the KV blocks."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

import grpc.aio

from kvasir.common.grpc_client import open_channel
from kvasir.common.grpc_server import bind, new_server
from kvasir.common.metrics import Metrics
from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.decode_node.node import DecodeNode
from kvasir.engine.blocks import BlockId, KVLayout, slot_mapping
from kvasir.engine.engine import Engine
from kvasir.engine.factory import ModelInfo
from kvasir.engine.limits import Limits
from kvasir.engine.request import RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import Sampled, StepPlan
from kvasir.kv_connector.costs import ALWAYS_FETCH, CostRule
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import ArrayMemory
from kvasir.node.metrics import NodeMetrics
from kvasir.node.parts import NodeParts
from kvasir.node.servicer import NodeServicer
from kvasir.prefill_node.node import PrefillNode
from kvasir.proto import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.fakes import fake_score

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, total_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
IDENTITY = bytes(range(32))
VOCAB_SIZE = 997
MODEL = ModelInfo(
    name="fake",
    kv_identity=IDENTITY,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({3, 1}),
    max_model_len=200,
    dtype="float32",
    layout=LAYOUT,
)
WITHIN_S = 60

_epochs = itertools.count(1)


def next_token(token_ids: list[int], seed: int = 0) -> int:
    return crc32(pack_tokens(token_ids), seed % 2**32) % VOCAB_SIZE


def generate(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the model says when nothing is distributed."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


class KVRunner:
    """Its "KV" is the token id in each slot, and it sees earlier tokens nowhere else: a block that is lost, stale or
    misplaced changes the next token. `before_step` can hold a step back."""

    def __init__(self, memory: ArrayMemory) -> None:
        self._memory = memory
        self.before_step: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        self.before_step()
        sampled = {}
        for chunk in plan.chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.end):
                self._slot(request.block_table, position)[:] = pack_tokens([request.token_ids[position]])
            if chunk.samples:
                seen = [unpack_tokens(bytes(self._slot(request.block_table, at)))[0] for at in range(chunk.end)]
                sampled |= {one.request_id: Sampled((next_token(seen, one.sampling.seed),)) for one in chunk.samplers}
            if chunk.scored:
                mine = sampled.get(request.request_id, Sampled())
                logprobs = tuple(fake_score(request.prompt_token_ids, position + 1) for position in chunk.scored)
                sampled[request.request_id] = replace(mine, prompt_logprobs=logprobs)
        return sampled

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self._memory.read(target)[:] = self._memory.read(source)

    def _slot(self, block_table: list[Any], position: int) -> memoryview:
        slot = slot_mapping(block_table, range(position, position + 1), BLOCK_SIZE)[0]
        block_id, offset = divmod(slot, BLOCK_SIZE)
        return self._memory.read(block_id)[offset * 4 : offset * 4 + 4]  # type: ignore[arg-type]


def parts(settings: ConnectorSettings, *, num_blocks: int = 64, **limits: Any) -> tuple[NodeParts, KVRunner]:
    """Without costs of the test's own, everything is fetched: how busy this machine is decides nothing."""
    if settings.costs == CostRule():
        settings = replace(settings, costs=ALWAYS_FETCH)
    memory = ArrayMemory(LAYOUT, num_blocks, seed=next(_epochs))
    runner = KVRunner(memory)
    all_limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_model_len": 200, "watermark": 0.0, **limits}
    found = Limits(block_size=BLOCK_SIZE, num_blocks=num_blocks, **all_limits)
    made = NodeParts(
        engine=Engine(Scheduler(found, IDENTITY), runner),
        memory=memory,
        connector=open_connector(settings),
        connector_settings=settings,
        metrics=NodeMetrics(Metrics({"model_name": "fake"})),
        epoch=f"epoch-{next(_epochs)}",
        model=MODEL,
    )
    return made, runner


class Running:
    """A node that serves, and a router's session with it."""

    def __init__(self, node: Any, runner: KVRunner, stub: Any, command: Any) -> None:
        self.node = node
        self.runner = runner
        self.stub = stub
        self._command = command
        self.outputs: dict[int, list[int]] = {}
        self.outputs_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by (handle, sequence)
        self.reasons: dict[tuple[int, int], int] = {}
        self.prompt_logprobs: list[common_pb2.PromptLogprobs] = []
        self.finished: dict[int, int] = {}
        self.failed: dict[int, common_pb2.RequestFailed] = {}
        self.progress: dict[int, common_pb2.TicketProgress] = {}
        self.admitted: dict[int, common_pb2.RequestAdmitted] = {}
        self.transfers: dict[int, common_pb2.TransferReport] = {}
        self.heartbeat: common_pb2.Heartbeat | None = None
        self.on_event: Callable[[common_pb2.SessionEvent], None] = lambda event: None
        self.last_event = 0
        self.progress_of: defaultdict[int, asyncio.Queue[common_pb2.TicketProgress]] = defaultdict(asyncio.Queue)
        self._numbers = itertools.count(1)
        self._writing = asyncio.Lock()

    async def send(self, **command: Any) -> None:
        async with self._writing:  # a call takes one write at a time
            await self.call.write(self._command(number=next(self._numbers), **command))

    @asynccontextmanager
    async def session(self, session_id: str = "router/1") -> AsyncIterator["Running"]:
        self._hearing = asyncio.create_task(self._hear(session_id))
        try:
            await self.until(lambda: self.heartbeat is not None)
            yield self
        finally:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)

    async def _hear(self, session_id: str) -> None:
        self.call = self.stub.Session(timeout=300)
        await self.call.write(self._command(open=common_pb2.OpenSession(session_id=session_id)))
        async for event in self.call:
            self._take(event)
            self.on_event(event)
            acknowledge = common_pb2.Acknowledge(last_event=self.last_event)
            async with self._writing:
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the call has ended: reading tells why
                    await self.call.write(self._command(acknowledge=acknowledge))

    def _take(self, event: common_pb2.SessionEvent) -> None:
        self.last_event = max(self.last_event, event.number)
        if event.HasField("heartbeat"):
            self.heartbeat = event.heartbeat
        if event.HasField("failed"):
            self.failed[event.failed.handle] = event.failed
        for output in event.step.outputs:
            self.outputs.setdefault(output.handle, []).extend(unpack_tokens(output.token_ids))
            self.outputs_of[output.handle, output.sequence] += unpack_tokens(output.token_ids)
            if output.finish_reason:
                self.finished[output.handle] = output.finish_reason
                self.reasons[output.handle, output.sequence] = output.finish_reason
        self.prompt_logprobs += event.step.prompt_logprobs
        for progress in event.step.progress:
            self.progress[progress.handle] = progress
            self.progress_of[progress.handle].put_nowait(progress)
        self.admitted.update({one.handle: one for one in event.step.admitted})
        self.transfers.update({one.handle: one for one in event.step.transfers})

    async def until(self, condition: Callable[[], object]) -> None:
        """What nobody hears any more is not waited for: what has ended the session is raised."""
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                if self._hearing.done() and not self._hearing.cancelled():
                    self._hearing.result()
                await asyncio.sleep(0.005)

    async def ends(self, handle: int) -> None:
        await self.until(lambda: handle in self.finished or handle in self.failed)

    def is_committed(self, handle: int) -> bool:
        return handle in self.progress and self.progress[handle].committed

    @property
    def num_free_blocks(self) -> int:
        return int(self.node.engine.stats().num_free_blocks)

    @property
    def is_at_rest(self) -> bool:
        """Nobody here holds anything."""
        node = self.node
        return (
            not node.in_flight and node.sender.num_leased_blocks == 0 and self.num_free_blocks == node.limits.num_blocks
        )


@asynccontextmanager
async def running(node: Any, runner: KVRunner, session_id: str = "router/1") -> AsyncIterator[Running]:
    is_prefill = isinstance(node, PrefillNode)
    server = new_server("127.0.0.1:0", None)
    description = common_pb2.NodeDescription(node_epoch=node.epoch)
    if is_prefill:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(NodeServicer(node, description), server)
    else:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(NodeServicer(node, description), server)
    await node.start()
    channel = open_channel(f"127.0.0.1:{bind(server, '127.0.0.1:0')}", None)
    await server.start()
    grpc_stub = prefill_pb2_grpc.PrefillServiceStub if is_prefill else decode_pb2_grpc.DecodeServiceStub
    command = prefill_pb2.PrefillCommand if is_prefill else decode_pb2.DecodeCommand
    try:
        async with Running(node, runner, grpc_stub(channel), command).session(session_id) as session:
            yield session
    finally:
        await channel.close(None)
        await server.stop(None)
        await node.close()  # checks the engine's invariants
        assert node.engine.stats().num_free_blocks == node.limits.num_blocks, "a block has not come back"


@asynccontextmanager
async def prefill(
    settings: ConnectorSettings, *, max_num_queued_tokens: int = 1000, **options: Any
) -> AsyncIterator[Running]:
    made, runner = parts(settings, **options)
    async with running(PrefillNode(made, max_num_queued_tokens), runner) as session:
        yield session


@asynccontextmanager
async def decode(settings: ConnectorSettings, *, writes_back: bool = False, **options: Any) -> AsyncIterator[Running]:
    made, runner = parts(settings, **options)
    node = DecodeNode(made, admission_timeout_s=WITHIN_S, writes_back=writes_back)
    async with running(node, runner) as session:
        yield session


@asynccontextmanager
async def pair(settings: ConnectorSettings, **options: Any) -> AsyncIterator[tuple[Running, Running]]:
    """One prefill and one decode node; the router between them passes progress on."""
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(prefill(settings, **options))
        receiver = await stack.enter_async_context(decode(settings, **options))
        yield sender, receiver


def request(prompt: list[int], max_tokens: int = 8, **fields: Any) -> common_pb2.GenerationRequest:
    stop = fields.pop("stop_token_ids", [])
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens, stop_token_ids=pack_tokens(stop), prompt_logprobs=fields.pop("prompt_logprobs", None)
    )
    fields.setdefault("num_sequences", 1)
    return common_pb2.GenerationRequest(
        request_id="r", prompt_token_ids=pack_tokens(prompt), sampling=sampling, **fields
    )


def ticket_for(sender: Running, transfer_id: str = "t1") -> common_pb2.Ticket:
    connector = sender.node.parts.connector
    endpoints = [common_pb2.Endpoint(address=connector.endpoint)] if connector.endpoint else []
    return common_pb2.Ticket(transfer_id=transfer_id, connector=connector.name, endpoints=endpoints)


def start_prefill(handle: int, what: common_pb2.GenerationRequest, ticket: common_pb2.Ticket) -> dict[str, Any]:
    return {"start": prefill_pb2.StartPrefill(handle=handle, request=what, ticket=ticket)}


def start_decode(
    handle: int, what: common_pb2.GenerationRequest, ticket: common_pb2.Ticket | None = None
) -> dict[str, Any]:
    return {"start": decode_pb2.StartDecode(handle=handle, request=what, ticket=ticket)}


def continue_decode(handle: int, *token_ids: list[int]) -> dict[str, Any]:
    """The first tokens of each sequence."""
    first = [decode_pb2.FirstTokens(sequence=i, token_ids=pack_tokens(ids)) for i, ids in enumerate(token_ids)]
    return {"continue_decode": decode_pb2.ContinueDecode(handle=handle, first=first)}


def progress(handle: int, num_blocks: int, committed: bool) -> dict[str, Any]:
    message = common_pb2.TicketProgress(handle=handle, num_blocks=num_blocks, committed=committed)
    return {"progress": decode_pb2.ReportProgress(progress=message)}
