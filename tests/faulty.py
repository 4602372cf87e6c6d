"""The connectors that ship, with faults that strike on the receiving side, between the transport and the checks.

A node takes one by its name, `--connector tests.faulty:FaultyTcp`; the environment says what goes wrong:
FAULT_DELAY_S    every block comes so much later, so that something else can strike in mid-transfer
FAULT_FLIP       one byte of this many blocks is flipped, whenever they are fetched; the first block that comes is spared
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence

from kvasir.kv_connector.base import BlockKey, Frame, KVConnector, Ticket
from kvasir.kv_connector.redis import RedisConnector
from kvasir.kv_connector.shared_storage import SharedStorageConnector
from kvasir.kv_connector.tcp import TcpConnector

_DELAY_S = float(os.environ.get("FAULT_DELAY_S", "0"))
_NUM_FLIPPED = int(os.environ.get("FAULT_FLIP", "0"))


class _Faults:
    def __init__(self) -> None:
        self._num_seen = 0
        self._victims: set[BlockKey] = set()

    async def strike(
        self, frames: AsyncGenerator[tuple[BlockKey, Frame | None]]
    ) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        async for key, frame in frames:
            await asyncio.sleep(_DELAY_S)
            self._num_seen += 1
            if frame is not None and self._num_seen > 1 and len(self._victims) < _NUM_FLIPPED:
                self._victims.add(key)
            yield key, flipped(frame) if frame is not None and key in self._victims else frame


def flipped(frame: Frame) -> Frame:
    damaged = bytearray(frame.payload)
    damaged[len(damaged) // 2] ^= 0x10
    return Frame(frame.header, memoryview(damaged))


def _faulty(base: type[KVConnector]) -> type[KVConnector]:
    class Faulty(base):  # type: ignore[valid-type,misc]
        def __init__(self, settings: object) -> None:
            super().__init__(settings)
            self._faults = _Faults()

        def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
            return self._faults.strike(super().fetch(ticket, keys))

    return Faulty


FaultyTcp = _faulty(TcpConnector)
FaultyRedis = _faulty(RedisConnector)
FaultySharedStorage = _faulty(SharedStorageConnector)
