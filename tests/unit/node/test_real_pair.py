"""One prefill node and one decode node as processes, on the built-in model; the test is their router."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvasir.common.grpc_client import open_channel
from kvasir.common.grpc_server import bind, new_server
from kvasir.proto import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from tests.unit.node.fakes import Running, continue_decode, progress, request, start_decode, start_prefill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

REPO = Path(__file__).parents[3]
SECRET = "a secret of some length"
START_S = 480
NUM_TOKENS = 10


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.nodes: dict[int, registry_pb2.AnnounceRequest] = {}
        self.withdrawn: set[str] = set()

    async def Announce(self, announced: Any, context: Any) -> Any:
        self.nodes[announced.node.role] = announced
        return registry_pb2.AnnounceResponse(announce_again_s=3)

    async def Withdraw(self, withdrawn: Any, context: Any) -> Any:
        self.withdrawn.add(withdrawn.address)
        return registry_pb2.WithdrawResponse()


@asynccontextmanager
async def node(role: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    environment |= {"PYTHONPATH": str(REPO / "src"), "KVASIR_CLUSTER_SECRET": SECRET}
    command = [sys.executable, "-m", f"kvasir.{role}_node", "--listen", "127.0.0.1:0", "--metrics-port", "0"]
    command += ["--threads", "1", "--kv-cache-memory", "150MiB", *arguments]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def session(announced: registry_pb2.AnnounceRequest, stub: Any, command: Any) -> AsyncIterator[Running]:
    async with (
        open_channel(announced.address, SECRET) as channel,
        Running(None, None, stub(channel), command).session() as running,  # type: ignore[arg-type]
    ):
        yield running


async def through_both(sender: Running, receiver: Running, handle: int, prompt: list[int], endpoint: str) -> list[int]:
    what = request(prompt, NUM_TOKENS, cache_salt="through both")
    endpoints = [common_pb2.Endpoint(address=endpoint)]
    ticket = common_pb2.Ticket(transfer_id=f"t{handle}", connector="tcp", endpoints=endpoints)
    await receiver.send(**start_decode(handle, what, ticket))
    await sender.send(**start_prefill(handle, what, ticket))
    committed = False
    while not committed:
        news = await asyncio.wait_for(sender.progress_of[handle].get(), 60)
        committed = news.committed
        await receiver.send(**progress(handle, news.num_blocks, committed))
    await sender.ends(handle)
    await receiver.send(**continue_decode(handle, sender.outputs[handle]))
    await receiver.ends(handle)
    return sender.outputs[handle] + receiver.outputs[handle]


async def alone(receiver: Running, handle: int, prompt: list[int]) -> list[int]:
    await receiver.send(**start_decode(handle, request(prompt, NUM_TOKENS, cache_salt="alone")))
    await receiver.send(**continue_decode(handle, []))
    await receiver.ends(handle)
    return receiver.outputs[handle]


async def test_what_both_say_together_is_what_one_says_alone(model_dir: Path) -> None:
    """Prompts of 1, 16, 17 and 600 tokens: less than a block, a block, one more, two chunks."""
    registry = Registry()
    server = new_server("127.0.0.1:0", SECRET)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    join = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    common = ("--model", str(model_dir), "--join", join)
    async with node("prefill", *common) as prefill, node("decode", *common) as decode:
        async with asyncio.timeout(START_S):
            while len(registry.nodes) < 2:
                assert prefill.returncode is None
                assert decode.returncode is None
                await asyncio.sleep(0.1)
        first, second = registry.nodes[common_pb2.ROLE_PREFILL], registry.nodes[common_pb2.ROLE_DECODE]
        assert first.node.kv_identity == second.node.kv_identity
        async with (
            session(first, prefill_pb2_grpc.PrefillServiceStub, prefill_pb2.PrefillCommand) as sender,
            session(second, decode_pb2_grpc.DecodeServiceStub, decode_pb2.DecodeCommand) as receiver,
        ):
            for handle, length in enumerate((1, 16, 17, 600), start=1):
                prompt = [(7 * i + 100 * handle) % 40_000 for i in range(length)]
                together = await through_both(sender, receiver, handle, prompt, first.node.kv_endpoint)
                assert len(together) == NUM_TOKENS
                report = receiver.transfers[handle]
                assert (report.num_blocks_fetched, report.num_tokens_recomputed) == (-(-length // 16), 0)
                assert together == await alone(receiver, 100 + handle, prompt)
            for process in (prefill, decode):
                process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(prefill.wait(), 60) == 0
            assert await asyncio.wait_for(decode.wait(), 60) == 0
        assert registry.withdrawn == {first.address, second.address}
    await server.stop(None)
