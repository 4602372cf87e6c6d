"""Blocks larger than what message layers allow by default (gRPC: 4 MiB) travel like any others."""

import asyncio

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.conformance.transfers import DEADLINE_S, eventually_free, send_all
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import pairs_of

EIGHT_MIB = KVLayout(num_layers=64, num_kv_heads=8, total_kv_heads=8, head_dim=128, block_size=16, dtype="float32")


async def test_blocks_of_8_mib(settings: ConnectorSettings) -> None:
    assert EIGHT_MIB.bytes_per_block == 8 << 20
    async with asyncio.timeout(2 * DEADLINE_S), pairs_of(settings)(EIGHT_MIB, num_blocks=4) as pair:
        await send_all(pair, 4)
        await eventually_free(pair)
        assert not pair.receiver.metrics.misses
        assert pair.receiver.metrics.bytes_fetched >= 4 * EIGHT_MIB.bytes_per_block
