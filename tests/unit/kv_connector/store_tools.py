"""For the tests of stores."""

from dataclasses import replace

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, Pair
from tests.valkey import RedisServer

BACK_OFF_S = 1000.0  # ends when the test says so


def settings_of(server: RedisServer, **changes: object) -> ConnectorSettings:
    """Patient, where a test does not want it otherwise: how busy this machine is decides nothing."""
    patient = {"store_backoff_s": BACK_OFF_S, "fetch_timeout_base_s": 60.0, "lookup_timeout_s": 60.0}
    return ConnectorSettings(name="redis", **{**patient, "redis_url": server.url, **changes})  # type: ignore[arg-type]  # names are checked by the class itself


def end_back_off(pair: Pair) -> None:
    """As if the time were over for which a store is left alone that has failed."""
    for node in (pair.sender, pair.receiver):
        assert node.sender._store is not None
        for guard in (node.sender._store._guard, node.receiver._guard):
            guard._closed_until_s = float("-inf")


def layout_of(num_mib: int) -> KVLayout:
    """Of blocks of about so many MiB; never fewer."""
    num_bytes_a_layer = LARGE.bytes_per_block // LARGE.num_layers
    return replace(LARGE, num_layers=-(-(num_mib << 20) // num_bytes_a_layer))


async def fetch(pair: Pair, keys: list[BlockKey]) -> tuple[int, ...]:
    """What is missing. All others are as they were."""
    result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
    assert all(pair.is_equal(index) for index in range(len(keys)) if index not in result.missing)
    return result.missing
