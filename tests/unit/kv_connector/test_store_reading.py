"""Reading ahead from a store: by several threads where it makes them wait."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from kvasir.kv_connector.base import StoreKey
from kvasir.kv_connector.store_reading import PAGE_BYTES, Sizes, StoreReader, Trays
from kvasir.kv_connector.threads import Job, Threads

KEYS = [StoreKey(str(index)) for index in range(7)]  # of which the trays take one, two and four
VALUE_BYTES = 1 << 20
DEADLINE_S = 60.0


async def test_a_call_that_waits_is_known_for_it() -> None:
    threads = Threads(1, "test")
    waiting = threads.start(lambda job: time.sleep(0.05))
    await waiting.outcome()
    assert waiting.has_waited
    threads.stop()


async def test_a_store_that_makes_its_readers_wait_is_read_by_several() -> None:
    both = threading.Barrier(2)

    def read(job: Job[Any], keys: Sequence[StoreKey], places: Sequence[memoryview]) -> Sizes:
        if KEYS[0] in keys:
            time.sleep(0.05)
        else:
            both.wait(DEADLINE_S)  # the second and the third tray, at once
        for index in range(len(keys)):
            yield index, PAGE_BYTES

    threads = Threads(4, "test")
    reader = StoreReader(threads, Trays(VALUE_BYTES), PAGE_BYTES, read)
    async with asyncio.timeout(DEADLINE_S), aclosing(reader.fetch(KEYS, None)) as frames:
        assert [key async for key, _ in frames] == KEYS
    threads.stop()
