"""A node without an engine: a real gRPC server that speaks the session protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc.aio

from kvasir.common.grpc_server import bind, new_server
from kvasir.common.tokens import unpack_tokens
from kvasir.proto import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.fake_engine import Fabric, FakeEngine
from tests.fake_request import VOCAB_SIZE, FakeSession
from tests.ports import held_port


class FakeNode(FakeEngine):
    """`async with FakeNode(role, fabric) as node`."""

    def __init__(self, role: str, fabric: Fabric, **behaviour: Any) -> None:
        super().__init__(role, fabric, **behaviour)
        self.epoch = uuid.uuid4().hex
        self.address = ""
        self.is_frozen = False
        self.num_resumed = 0
        self.num_snapshots_asked = 0
        self._server: grpc.aio.Server | None = None
        self._held = ExitStack()

    # --- life --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeNode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        self._held.close()

    async def start(self, listen: str = "") -> None:
        """Without `listen`, on a port that stays its own: it may be started there again."""
        listen = listen or f"127.0.0.1:{self._held.enter_context(held_port())}"
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
            answer: registry_pb2.AnnounceResponse = await stub.Announce(request, timeout=60)
            return answer

    # --- what it shows -----------------------------------------------------------------------------------------

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
            self.begin(session, command.start)
        elif kind == "snapshot":
            self.num_snapshots_asked += 1
        elif kind == "release":
            self.release(session, command.release.handle)
        elif kind == "cancel":
            cancel = command.cancel
            self.cancel(session, cancel.handle, cancel.sequence if cancel.HasField("sequence") else None)
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
