"""Which blocks wait to be written, and for how long."""

import asyncio
from collections.abc import Sequence
from typing import cast

from kvasir.decode_node.write_back import WriteBack
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey, KVBlock
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.sender import KVSender


class Sender:
    """Writes when it is let."""

    def __init__(self) -> None:
        self.metrics = TransferMetrics()
        self.may_write = asyncio.Event()
        self.written: list[int] = []

    async def store(self, blocks: Sequence[KVBlock]) -> None:
        await self.may_write.wait()
        self.written += [block.index for block in blocks]


def blocks(*indices: int) -> list[KVBlock]:
    return [KVBlock(i, BlockKey(bytes([i]) * 32), BlockId(i), 16) for i in indices]


async def test_where_blocks_become_short_those_that_wait_are_given_up_too() -> None:
    sender, released, is_short = Sender(), list[BlockId](), False
    tasks: list[asyncio.Task[None]] = []
    write_back = WriteBack(
        cast(KVSender, sender),
        released.extend,
        lambda work: tasks.append(asyncio.create_task(work)),
        lambda: is_short,
        max_blocks=100,
    )
    write_back.add(blocks(*range(16)))
    await asyncio.sleep(0)  # being written
    write_back.add(blocks(16, 17))
    assert write_back.num_waiting == 2
    is_short = True
    write_back.add(blocks(18))
    assert write_back.num_waiting == 0
    assert released == [16, 17, 18]
    assert sender.metrics.blocks_not_stored == 3
    sender.may_write.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert sender.written == list(range(16))
