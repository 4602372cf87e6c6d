"""Real nodes under the real dispatcher, in one process: whoever leaves, whatever breaks, no answer is wrong and
nothing stays anywhere."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.common.grpc_server import bind, new_server
from kvasir.common.metrics import Metrics
from kvasir.common.seeds import sequence_seed
from kvasir.decode_node.node import DecodeNode
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.description import description_of
from kvasir.node.servicer import NodeServicer
from kvasir.prefill_node.node import PrefillNode
from kvasir.proto import decode_pb2_grpc, prefill_pb2_grpc
from kvasir.router.cluster import Cluster, running_cluster
from kvasir.router.config import RouterConfig
from kvasir.router.types import Reader, RoutedRequest, Sampling
from tests.fakes import fake_score
from tests.unit.node.fakes import BLOCK_SIZE, VOCAB_SIZE, generate, parts
from tests.waiting import until

NUM_REQUESTS = 40
DEADLINE_S = 90.0


TOKENS_A_LOSS = 10  # a machine that is slow is not struck more often than it gets on


@dataclass
class Whole:
    cluster: Cluster
    prefill: Sequence[PrefillNode]
    decode: Sequence[DecodeNode]
    num_tokens: int = 0  # that have come

    @property
    def nodes(self) -> list[Any]:
        return [*self.prefill, *self.decode]

    @property
    def is_at_rest(self) -> bool:
        members = self.cluster.pool.nodes()
        return not (
            self.cluster.dispatcher.num_in_flight
            or self.cluster.queue.num_waiting
            or any(member.reservations or member.session.num_requests for member in members)
            or any(len(node.in_flight) or node.sender.num_leased_blocks for node in self.nodes)
            or any(node.engine.stats().num_free_blocks < node.limits.num_blocks for node in self.nodes)
        )


@asynccontextmanager
async def whole_cluster(settings: ConnectorSettings, num_blocks: int) -> AsyncIterator[Whole]:
    async with AsyncExitStack() as stack:
        prefill, decode = [], []
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for role in ("prefill", "decode", "prefill", "decode"):
            made, runner = parts(settings, num_blocks=num_blocks, max_model_len=80)
            runner.before_step = lambda: time.sleep(0.002)  # so that there is a middle of things
            node: Any = PrefillNode(made, 200) if role == "prefill" else DecodeNode(made, admission_timeout_s=5)
            (prefill if role == "prefill" else decode).append(node)
            await node.start()
            stack.push_async_callback(node.close)  # checks the engine's invariants
            addresses[role].append(await _serve(node, stack))
        config = RouterConfig(grpc_listen="127.0.0.1:0", node_wait_s=30, max_attempts=100, **addresses)
        cluster = await stack.enter_async_context(running_cluster(config, None, Metrics()))
        await until(lambda: cluster.dispatcher.has_joined(2, 2))
        yield Whole(cluster, prefill, decode)


async def _serve(node: Any, stack: AsyncExitStack) -> str:
    server = new_server("127.0.0.1:0", None)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    description = description_of(node)
    if isinstance(node, PrefillNode):
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(NodeServicer(node, description), server)
    else:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(NodeServicer(node, description), server)
    await server.start()
    stack.push_async_callback(server.stop, None)
    return address


async def ask(whole: Whole, dice: random.Random, number: int) -> None:
    """Some share a prefix, some are whole blocks, some end with their first token, some clients leave. Some want
    several sequences, and stop one of them; some want their prompt scored."""
    length = dice.choice([1, BLOCK_SIZE, 3 * BLOCK_SIZE, 8 * BLOCK_SIZE, dice.randrange(1, 50)])
    shared = dice.randrange(0, length + 1)
    prompt = [*range(shared), *((number * 31 + index) % VOCAB_SIZE for index in range(length - shared))]
    max_tokens = dice.choice([1, 2, 5, 25, 30])
    num_sequences = dice.choice([1, 1, 1, 2, 3])
    right = [generate(prompt, max_tokens, sequence_seed(0, sequence)) for sequence in range(num_sequences)]
    ends = {right[0][dice.randrange(max_tokens)]} if dice.random() < 0.3 else set()
    leaves_after = dice.choice([None, None, None, 0, 1, 3])
    stops_last_after = dice.choice([None, None, 4]) if num_sequences > 1 else None
    is_scored = dice.random() < 0.2
    request = RoutedRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(
            max_tokens=max_tokens, stop_token_ids=frozenset(ends), prompt_logprobs=0 if is_scored else None
        ),
        num_sequences=num_sequences,
    )
    reader = Reader()
    tokens: list[list[int]] = [[] for _ in range(num_sequences)]
    logprobs: list[float] = []
    try:
        async with (
            asyncio.timeout(dice.uniform(0, 0.1) if leaves_after == 0 else DEADLINE_S),
            aclosing(whole.cluster.dispatcher.generate(request, reader)) as deltas,
        ):
            async for delta in deltas:
                tokens[delta.sequence] += delta.token_ids
                whole.num_tokens += len(delta.token_ids)
                logprobs += [position.entries[0][1] for position in delta.prompt_logprobs]
                if leaves_after is not None and len(tokens[0]) >= leaves_after > 0:
                    break
                if len(tokens[-1]) == stops_last_after:
                    reader.stop(num_sequences - 1)
    except TimeoutError:
        assert leaves_after == 0, f"request {number} hangs after {tokens}"
    for sequence, (said, whole_text) in enumerate(zip(tokens, right, strict=True)):
        is_cut = leaves_after is not None or (stops_last_after is not None and sequence == num_sequences - 1)
        end = min((whole_text.index(token) + 1 for token in ends & set(whole_text)), default=max_tokens)
        assert said == whole_text[: len(said) if is_cut else end]
    if is_scored and leaves_after is None:
        assert logprobs == [fake_score(prompt, position).entries[0][1] for position in range(1, length)]


@pytest.mark.parametrize("connector", ["memory", "tcp", "shared_storage"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_happens(connector: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    settings = ConnectorSettings(name=connector, path=str(tmp_path), lease_s=5.0, store_backoff_s=0.05)
    async with whole_cluster(settings, num_blocks=22) as whole:
        if connector == "shared_storage":
            for node in whole.nodes:
                _refuse_now_and_then(node, dice, monkeypatch)
        answers = [asyncio.create_task(ask(whole, dice, number)) for number in range(NUM_REQUESTS)]
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(dice.uniform(0.02, 0.15))
            enough = whole.num_tokens + TOKENS_A_LOSS
            while whole.num_tokens < enough and not all(answer.done() for answer in answers):
                await asyncio.sleep(0.005)
            node = dice.choice(whole.nodes)
            for session in node.sessions:  # as if its router had been away for too long
                node.sessions.end(session)
        await asyncio.gather(*answers)
        await until(lambda: whole.is_at_rest)
        assert sum(node.transfer_metrics.blocks_fetched for node in whole.decode) > 0


def _refuse_now_and_then(node: Any, dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    put = node.parts.connector.put

    async def moody(frames: object) -> None:
        if dice.random() < 0.3:
            raise KVTransferError("no space left")
        await put(frames)

    monkeypatch.setattr(node.parts.connector, "put", moody)
