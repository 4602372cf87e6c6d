"""What this process was too busy for, or too stopped for, is not the store's fault."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvasir.kv_connector.encoder import Encoder
from kvasir.kv_connector.testing import Connect, random_keys
from tests.unit.kv_connector.shared_storage.conftest import DEADLINE_S
from tests.unit.kv_connector.store_tools import fetch

ALLOWANCE_S, STALL_S = 2.0, 3.5  # longer than the allowance and its grace


async def test_a_process_that_was_stopped_does_not_blame_its_store(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(fetch_timeout_base_s=ALLOWANCE_S) as pair:
        keys = random_keys(2)
        writing = asyncio.create_task(pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(time.sleep, STALL_S)
        await writing
        assert pair.sender.metrics.store_failures == 0
        assert pair.sender.sender._store is not None
        assert pair.sender.sender._store._guard.is_open
        assert await fetch(pair, keys) == ()


async def test_time_to_pack_blocks_is_not_the_stores(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    frame: Callable[..., Any] = Encoder.frame

    def slowly(encoder: Encoder, *args: Any, **kwargs: Any) -> Any:
        time.sleep(STALL_S)
        return frame(encoder, *args, **kwargs)

    monkeypatch.setattr(Encoder, "frame", slowly)
    async with asyncio.timeout(DEADLINE_S), connect(fetch_timeout_base_s=ALLOWANCE_S, codec="lossless") as pair:
        keys = random_keys(1)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert pair.sender.metrics.store_failures == 0
        assert await fetch(pair, keys) == ()
