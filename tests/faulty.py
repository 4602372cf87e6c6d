"""Connectors that misbehave on purpose, by a script.

A node of a test cluster takes one by its path, `--connector tests.faulty:FaultyTcp`, and its script from the variable
KVASIR_TEST_FAULTS: a JSON list such as [{"kind": "flip", "block": 3}].
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import Frame, PeerConnector, StoreConnector
from kvasir.kv_connector.header import pack, unpack
from kvasir.kv_connector.redis import RedisConnector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage import SharedStorageConnector
from kvasir.kv_connector.tcp import TcpConnector

K = TypeVar("K")

VARIABLE = "KVASIR_TEST_FAULTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Strikes the receiving side at the `block`-th key that is asked for, or at every one, `times` times in all."""

    kind: str  # drop, absent, delay, truncate, flip, duplicate, swap, identity, layout, tokens, epoch, header, lost
    block: int | None = None
    times: int = 1
    delay_s: float = 0.05


class _Faults:
    def __init__(self, script: Sequence[Fault]) -> None:
        self.struck: Counter[Fault] = Counter()
        self._script = script
        self._positions: dict[object, int] = {}

    async def spoil(
        self, keys: Sequence[K], frames: AsyncGenerator[tuple[K, Frame | None]]
    ) -> AsyncGenerator[tuple[K, Frame | None]]:
        for key in keys:
            self._positions.setdefault(key, len(self._positions))
        last: Frame | None = None
        async with aclosing(frames):
            async for key, frame in frames:
                own = None if frame is None else Frame(frame.header, memoryview(bytes(frame.payload)))
                for fault in self._script:
                    if fault.block in (None, self._positions[key]) and self.struck[fault] < fault.times:
                        self.struck[fault] += 1
                        async for spoilt in _strike(fault, own, last):
                            yield key, spoilt
                        break
                else:
                    yield key, own
                last = own


async def _strike(fault: Fault, frame: Frame | None, last: Frame | None) -> AsyncGenerator[Frame | None]:
    if fault.kind == "lost":
        raise KVTransferError("lost, by script")
    if fault.kind == "drop":
        return
    if fault.kind == "delay":
        await asyncio.sleep(fault.delay_s)
    yield None if frame is None or fault.kind == "absent" else _spoilt(fault, frame, last)
    if fault.kind == "duplicate":
        yield frame


def _spoilt(fault: Fault, frame: Frame, last: Frame | None) -> Frame:
    payload = bytearray(frame.payload)
    match fault.kind:
        case "truncate":
            return Frame(frame.header, memoryview(payload)[:-1])
        case "flip":
            payload[len(payload) // 2] ^= 1
            return Frame(frame.header, memoryview(payload))
        case "header":
            return Frame(frame.header[:-1] + bytes([frame.header[-1] ^ 1]), frame.payload)
        case "swap":
            assert last is not None, "nothing before the first block to swap it with"
            return last
    header = unpack(frame.header)
    match fault.kind:
        case "identity":
            header = replace(header, kv_identity=b"\0" * 32)
        case "layout":
            header = replace(header, layout=replace(header.layout, head_dim=header.layout.head_dim + 1))
        case "tokens":
            header = replace(header, num_tokens=header.num_tokens - 1)
        case "epoch":
            header = replace(header, sender_epoch="another process")
        case "codec":
            header = replace(header, codec="of tomorrow")
    return Frame(pack(header), frame.payload)


class FaultyPeer:
    """Everything but `fetch` is the inner connector's."""

    def __init__(self, inner: PeerConnector, script: Sequence[Fault]) -> None:
        self.faults = _Faults(script)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fetch(self, ticket: Any, keys: Sequence[Any]) -> AsyncGenerator[tuple[Any, Frame | None]]:
        return self.faults.spoil(keys, self._inner.fetch(ticket, keys))


class FaultyStore:
    """Everything but `fetch` is the inner connector's."""

    def __init__(self, inner: StoreConnector, script: Sequence[Fault]) -> None:
        self.faults = _Faults(script)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fetch(self, keys: Sequence[Any]) -> AsyncGenerator[tuple[Any, Frame | None]]:
        return self.faults.spoil(keys, self._inner.fetch(keys))


def _script_of_environment() -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(os.environ.get(VARIABLE, "[]"))]


class FaultyTcp(FaultyPeer):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(TcpConnector(settings), _script_of_environment())


class FaultyRedis(FaultyStore):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(RedisConnector(settings), _script_of_environment())


class FaultySharedStorage(FaultyStore):
    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(SharedStorageConnector(settings), _script_of_environment())
