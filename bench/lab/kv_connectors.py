"""A connector as nodes use it: `python -m kvasir.bench.lab.kv_connectors send|receive JSON`, one process each.

{"layout", "num_blocks", "settings"}; the receiver copies into a KV cache whose memory has been touched.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import torch

from kvasir.bench.lab.kv_pipe import Answer, Teller, checksum
from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.kv_cache import KVCache
from kvasir.kv_connector.base import BlockKey, Endpoint, KVBlock, Ticket, TransferId
from kvasir.kv_connector.receiver import KVReceiver
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.sender import KVSender
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.stored import store_key

_IDENTITY = bytes(32)


class Side:
    """One node: a cache, a connector, and the halves above it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.layout = KVLayout(**task["layout"])
        self.num_blocks: int = task["num_blocks"]
        settings = ConnectorSettings(**task["settings"])
        self.cache = KVCache(self.layout, self.num_blocks, torch.device("cpu"))
        self.connector = open_connector(settings)
        self.sender = KVSender(self.connector, self.cache, _IDENTITY, "1", lambda blocks: None, settings)
        self.receiver = KVReceiver(self.connector, self.cache, _IDENTITY, settings)
        self.keys: list[BlockKey] = []

    @property
    def memory(self) -> memoryview:
        return self.cache.data.view(-1).view(torch.uint8).numpy().data

    # The sender.

    def fill(self) -> int:
        self.cache.data.view(-1).copy_(torch.randn(self.cache.data.numel(), generator=torch.manual_seed(1)))
        return checksum(self.memory)

    async def offer(self) -> Answer:
        """Publish all blocks under new keys."""
        self.keys = [BlockKey(random.randbytes(32)) for _ in range(self.num_blocks)]
        endpoints = (Endpoint(self.connector.endpoint),) if self.connector.endpoint else ()
        transfer_id = TransferId(random.randbytes(8).hex())
        ticket = Ticket(transfer_id=transfer_id, connector=self.connector.name, endpoints=endpoints)
        blocks = [KVBlock(i, key, BlockId(i), self.layout.block_size) for i, key in enumerate(self.keys)]
        start_s = time.perf_counter()
        await self.sender.publish(ticket, blocks)
        elapsed_s = time.perf_counter() - start_s
        return {"s": elapsed_s, "ticket": asdict(ticket), "keys": [key.hex() for key in self.keys]}

    async def discard(self) -> Answer:
        """So that a server's memory does not grow from round to round. Files stay, as they would: a file system is
        slow to make new ones where many have just been removed."""
        if self.connector.is_store and self.connector.name != "shared_storage":
            await self.connector.discard([store_key(key, self.layout) for key in self.keys])
        return {}

    # The receiver.

    async def clear(self) -> Answer:
        self.cache.data.zero_()
        return {}

    async def checksum(self) -> Answer:
        return {"checksum": checksum(self.memory)}

    async def take(self, ticket: dict[str, Any], keys: list[str], compute_s_a_token: float | None = None) -> Answer:
        """Where computing is said to cost something, what is slower is given up for it."""

        def compute_s(num_tokens: int) -> float | None:
            return None if compute_s_a_token is None else num_tokens * compute_s_a_token

        endpoints = tuple(Endpoint(**endpoint) for endpoint in ticket.pop("endpoints"))
        wanted = [
            KVBlock(i, BlockKey(bytes.fromhex(key)), BlockId(i), self.layout.block_size) for i, key in enumerate(keys)
        ]
        start_s = time.perf_counter()
        transfer = self.receiver.start(
            Ticket(**ticket, endpoints=endpoints), wanted, lambda index, is_exact: None, compute_s
        )
        transfer.progress(len(wanted), committed=True)
        result = await transfer.done()
        elapsed_s = time.perf_counter() - start_s
        return {"s": elapsed_s, "missing": len(result.missing)}


async def run(role: str, task: dict[str, Any], teller: Teller) -> None:
    torch.set_num_threads(1)
    side = Side(task)
    await side.sender.start()
    try:
        teller.tell(checksum=side.fill() if role == "send" else 0)
        methods = (side.offer, side.discard, side.clear, side.take, side.checksum)
        verbs: dict[str, Callable[..., Awaitable[Answer]]] = {method.__name__: method for method in methods}
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            teller.tell(**await verbs[question.pop("do")](**question))
    finally:
        await side.receiver.close()
        await side.sender.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], json.loads(sys.argv[2]), Teller()))
