"""A codec is loaded with its first block, which may take seconds: neither the peer nor the store is to blame for it."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.kv_connector import codec, codec_packing
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import pairs_of, random_keys

ALLOWANCE_S, LOADING_S = 2.0, 4.0
DEADLINE_S = 60.0


@pytest.mark.parametrize("connector", ["tcp", "shared_storage"])
async def test_time_to_load_a_codec_is_not_its_senders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connector: str
) -> None:
    settings = ConnectorSettings(name=connector, path=str(tmp_path), codec="int8", fetch_timeout_base_s=ALLOWANCE_S)
    unpack, is_first = codec_packing.unpack_scaled, [True]

    def slow_at_first(*args: Any) -> Any:
        if is_first:
            is_first.clear()
            time.sleep(LOADING_S)
        return unpack(*args)

    async with asyncio.timeout(DEADLINE_S), pairs_of(settings)() as pair:
        keys, ticket = random_keys(3), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        monkeypatch.setattr(codec_packing, "unpack_scaled", slow_at_first)
        monkeypatch.setattr(codec, "_loaded", set())
        stored = ticket if connector == "tcp" else replace(ticket, stored_as=pair.sender.sender.stored_as)
        transfer = pair.start(stored, keys)
        transfer.progress(len(keys), committed=True)
        assert (await transfer.done()).missing == ()
        assert not is_first
        assert pair.receiver.metrics.retries == pair.receiver.metrics.store_failures == 0
