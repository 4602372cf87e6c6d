"""Backends that answer at once, for measuring what stands before them: `python -m ... node|echo`.

`node`: decode nodes without an engine, which speak our sessions. `echo`: an OpenAI server of one kind of answer. Both
give one token a tick to each of their streams. The text of a token is the tick's number, and `--stamps` is a file in
which the time of each tick stands, so that whoever reads the token knows when it was made.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import argparse
import asyncio
import gc
import math
import mmap
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import uvloop

from kvasir.common.grpc_server import bind, new_server
from kvasir.common.tokens import pack_tokens
from kvasir.proto import common_pb2 as pb
from kvasir.proto import decode_pb2_grpc

NUM_TICKS = 10_000  # then their numbers begin again
FIRST_TOKEN_ID = 256  # text of the token with this id: " 0000"
_HEARTBEAT_S = 0.4
_MANY = 1 << 20


class Clock:
    """Numbers ticks and writes their times down. Groups of streams tick in turn, at even distances."""

    def __init__(self, stamps: Path, interval_s: float, num_groups: int) -> None:
        with stamps.open("r+b") as file:
            self._stamps = memoryview(mmap.mmap(file.fileno(), NUM_TICKS * 8)).cast("d")
        self._interval_s = interval_s
        self._num_groups = num_groups
        self._start_s = time.monotonic()
        self._number = 0

    async def run(self, group: int, tick: Callable[[int], None]) -> None:
        """One that comes late is not made up for."""
        phase_s = self._interval_s * group / self._num_groups
        next_s = self._start_s + phase_s
        next_s += self._interval_s * max(0, math.ceil((time.monotonic() - next_s) / self._interval_s))
        await asyncio.sleep(next_s - time.monotonic())
        while True:
            self._number = (self._number + 1) % NUM_TICKS
            self._stamps[self._number] = time.monotonic()
            tick(self._number)
            next_s = max(next_s + self._interval_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())


# --- our sessions ----------------------------------------------------------------------------------------------------


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
        await session.beat(self._max_num_seqs)
        work = [
            self._clock.run(self._group, session.tick),
            session.write(),
            session.keep_beating(self._max_num_seqs, self._beats_after_s),
        ]
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

    async def keep_beating(self, num_seqs: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self.beat(num_seqs)

    async def beat(self, num_seqs: int) -> None:
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


# --- OpenAI's stream -------------------------------------------------------------------------------------------------

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_OTHER = b'{"status":"ok","object":"list","data":[{"id":"m","object":"model"}],"model_path":"m"}'
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_OTHER), _OTHER)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')  # a router may call it by its newer name
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" %04d"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Echo(asyncio.Protocol):
    """One connection. Answers each POST with a stream, anything else with some JSON."""

    def __init__(self, running: set[Echo]) -> None:
        self._running = running
        self._num_left = 0
        self._data = b""
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._running.discard(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        body, self._data = rest[:length], rest[length:]
        if lines[0].startswith(b"post /v1/chat/"):
            self._transport.write(_HEAD)
            found = _MAX_TOKENS.search(body)
            if found is None:  # answers of another length than asked for would be another measurement
                raise ValueError(f"no max_tokens in {body!r}")
            self._num_left = int(found[1])
            self._running.add(self)
        else:
            self._transport.write(_JSON)

    def emit(self, event: bytes) -> None:
        if self._is_paused:
            return
        self._num_left -= 1
        if self._num_left == 0:
            self._running.discard(self)
            event += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self._transport.write(event)


async def serve_echo(clock: Clock, num_groups: int) -> None:
    groups: list[set[Echo]] = [set() for _ in range(num_groups)]
    turns = iter(range(1 << 62))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(groups[next(turns) % num_groups]), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)

    def tick_of(group: set[Echo]) -> Callable[[int], None]:
        def tick(number: int) -> None:
            event = _EVENT % number
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            for stream in list(group):
                stream.emit(chunk)

        return tick

    await asyncio.gather(*(clock.run(number, tick_of(group)) for number, group in enumerate(groups)))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["node", "echo"])
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--interval-s", type=float, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    options = parser.parse_args(argv)
    clock = Clock(options.stamps, options.interval_s, options.groups)
    work = (
        serve_nodes(clock, options.groups, -(-options.streams // options.groups) + 1)
        if options.kind == "node"
        else serve_echo(clock, options.groups)
    )
    gc.disable()  # its pauses would be taken for the router's
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
