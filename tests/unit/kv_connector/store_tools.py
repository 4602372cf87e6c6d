"""For the tests of stores."""

from dataclasses import replace

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, Pair
from tests.valkey import RedisServer


def settings_of(server: RedisServer, **changes: object) -> ConnectorSettings:
    quick = {"store_backoff_s": 0.2, "fetch_timeout_base_s": 2.0, "redis_url": server.url, **changes}
    return ConnectorSettings(name="redis", **quick)  # type: ignore[arg-type]  # names are checked by the class itself


def layout_of(num_mib: int) -> KVLayout:
    """Of blocks of about so many MiB; never fewer."""
    num_bytes_a_layer = LARGE.bytes_per_block // LARGE.num_layers
    return replace(LARGE, num_layers=-(-(num_mib << 20) // num_bytes_a_layer))


async def fetch(pair: Pair, keys: list[BlockKey]) -> tuple[int, ...]:
    """What is missing. All others are as they were."""
    result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
    assert all(pair.is_equal(index) for index in range(len(keys)) if index not in result.missing)
    return result.missing
