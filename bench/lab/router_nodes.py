"""Decode nodes without an engine: they speak our sessions, and give each of their requests one token a tick."""

import asyncio
import uuid
from typing import Any

from kvasir.bench.lab.router_clock import FIRST_TOKEN_ID, NUM_TICKS, Clock
from kvasir.common.grpc_server import bind, new_server
from kvasir.common.tokens import pack_tokens
from kvasir.proto import common_pb2 as pb
from kvasir.proto import decode_pb2_grpc

_HEARTBEAT_S = 0.4
_MANY = 1 << 20


class Node(decode_pb2_grpc.DecodeServiceServicer):
    """One decode node. Each stream gets its token at each tick from `continue` on."""

    def __init__(self, clock: Clock, group: int, beats_after_s: float, max_num_seqs: int) -> None:
        self._clock = clock
        self._group = group
        self._beats_after_s = beats_after_s
        self._max_num_seqs = max_num_seqs
        self._epoch = uuid.uuid4().hex

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:
        node = pb.NodeDescription(
            role=pb.ROLE_DECODE,
            node_epoch=self._epoch,
            model_name="m",
            kv_identity=b"m",
            block_size=16,
            num_kv_heads=1,
            vocab_size=FIRST_TOKEN_ID + NUM_TICKS,
            max_model_len=1 << 16,
            max_num_seqs=self._max_num_seqs,
            num_total_blocks=_MANY,
            max_num_batched_tokens=1 << 16,
            connector="memory",
        )
        return pb.DescribeResponse(node=node)

    async def Session(self, commands: Any, context: Any) -> None:
        await anext(commands)
        session = _Session(context)
        await context.write(pb.SessionEvent(opened=pb.SessionOpened(node_epoch=self._epoch)))
        await session.beat()
        work = (self._clock.run(self._group, session.tick), session.write(), session.keep_beating(self._beats_after_s))
        tasks = [asyncio.create_task(one) for one in work]
        try:
            async for command in commands:
                session.obey(command)
        finally:
            for task in tasks:
                task.cancel()


class _Session:
    """As a node's: while the stream cannot be written, later steps merge into the one that waits."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._num_left: dict[int, int] = {}  # by handle, of those that have been continued
        self._max_tokens: dict[int, int] = {}
        self._admitted: list[int] = []
        self._tokens: dict[int, list[int]] = {}
        self._last_command = 0
        self._num_events = 0
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()

    def obey(self, command: Any) -> None:
        self._last_command = command.number or self._last_command
        kind = command.WhichOneof("command")
        if kind == "start":
            self._max_tokens[command.start.handle] = command.start.request.sampling.max_tokens
            self._admitted.append(command.start.handle)
            self._news.set()
        elif kind == "continue_decode":
            handle = command.continue_decode.handle
            self._num_left[handle] = self._max_tokens.pop(handle)
        elif kind == "cancel":
            self._num_left.pop(command.cancel.handle, None)
            self._tokens.pop(command.cancel.handle, None)

    def tick(self, number: int) -> None:
        token_id = FIRST_TOKEN_ID + number
        for handle, num_left in list(self._num_left.items()):
            self._tokens.setdefault(handle, []).append(token_id)
            if num_left > 1:
                self._num_left[handle] = num_left - 1
            else:
                del self._num_left[handle]
        if self._tokens:
            self._news.set()

    async def write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            outputs = [self._output(handle, token_ids) for handle, token_ids in self._tokens.items()]
            admitted = [pb.RequestAdmitted(handle=handle) for handle in self._admitted]
            self._tokens, self._admitted = {}, []
            self._num_events += 1
            step = pb.StepOutput(outputs=outputs, admitted=admitted)
            await self._write(pb.SessionEvent(number=self._num_events, step=step))

    def _output(self, handle: int, token_ids: list[int]) -> pb.SequenceOutput:
        reason = pb.FINISH_REASON_UNSPECIFIED if handle in self._num_left else pb.FINISH_REASON_LENGTH
        return pb.SequenceOutput(handle=handle, token_ids=pack_tokens(token_ids), finish_reason=reason)

    async def keep_beating(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self.beat()

    async def beat(self) -> None:
        load = pb.NodeLoad(num_running=len(self._num_left), num_free_blocks=_MANY, num_total_blocks=_MANY)
        await self._write(pb.SessionEvent(heartbeat=pb.Heartbeat(load=load, last_command=self._last_command)))

    async def _write(self, event: pb.SessionEvent) -> None:
        async with self._writing:
            await self._context.write(event)


async def serve_nodes(clock: Clock, num_nodes: int, max_num_seqs: int) -> None:
    servers, ports = [], []
    for group in range(num_nodes):
        server = new_server("127.0.0.1:0", None)
        beats_after_s = _HEARTBEAT_S * group / num_nodes  # as of processes that have not started in one moment
        node = Node(clock, group, beats_after_s, max_num_seqs)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(node, server)  # type: ignore[no-untyped-call]
        ports.append(bind(server, "127.0.0.1:0"))
        await server.start()
        servers.append(server)
    print(*ports, flush=True)
    await asyncio.Event().wait()
