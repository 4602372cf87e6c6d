"""What `/metrics` says of the blocks that a node has moved."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import Running, generate, pair
from tests.unit.node.test_pair import run


def samples_of(node: Running) -> dict[tuple[str, str, str], float]:
    """By name, connector and the first label of the sample's own, if it has one."""
    text = node.node.metrics.metrics.render()[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvasir:kv_"):
                own = [value for key, value in sample.labels.items() if key not in ("connector", "model_name")]
                found[sample.name, sample.labels.get("connector", ""), own[0] if own else ""] = sample.value
    return found


async def test_both_directions_of_a_peer() -> None:
    async with pair(ConnectorSettings(name="memory")) as (sender, receiver):
        prompt = list(range(33))
        assert await run(sender, receiver, 1, prompt, 4) == generate(prompt, 4)
        await sender.until(lambda: sender.node.sender.num_leased_blocks == 0)
        out, into = samples_of(sender), samples_of(receiver)
        block_bytes = sender.node.parts.memory.layout.bytes_per_block
        assert out["kvasir:kv_blocks_sent_total", "memory", ""] == 9
        assert out["kvasir:kv_bytes_sent_total", "memory", ""] == 9 * block_bytes
        assert out["kvasir:kv_send_seconds_total", "memory", ""] > 0
        assert out["kvasir:kv_blocks_to_publish", "", ""] == 0
        assert into["kvasir:kv_blocks_to_write_back", "", ""] == 0
        assert out["kvasir:kv_leases", "memory", ""] == out["kvasir:kv_blocks_lent", "memory", ""] == 0
        assert into["kvasir:kv_blocks_fetched_total", "memory", ""] == 9
        assert into["kvasir:kv_bytes_fetched_total", "memory", ""] == 9 * block_bytes
        assert into["kvasir:kv_transfers_total", "memory", ""] == 1
        assert into["kvasir:kv_transfers_running", "memory", ""] == 0
        assert into["kvasir:kv_misses_total", "memory", "slow"] == 0


async def test_both_directions_of_a_store(tmp_path: Path) -> None:
    async with pair(ConnectorSettings(name="shared_storage", path=str(tmp_path))) as (sender, receiver):
        prompt = list(range(33))
        assert await run(sender, receiver, 1, prompt, 4) == generate(prompt, 4)
        out = samples_of(sender)
        assert out["kvasir:kv_blocks_stored_total", "shared_storage", ""] == 9
        assert out["kvasir:kv_store_seconds_total", "shared_storage", ""] > 0
        assert out["kvasir:kv_store_failures_total", "shared_storage", "writing"] == 0
        assert samples_of(receiver)["kvasir:kv_blocks_fetched_total", "shared_storage", ""] == 9
