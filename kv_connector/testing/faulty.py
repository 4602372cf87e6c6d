"""A connector that misbehaves on purpose, by a script, on its receiving side."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import Frame, KVConnector, Land
from kvasir.kv_connector.header import pack, unpack

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Strikes at the `block`-th key that is asked for, or at every one, `times` times in all.

    drop, absent, delay, lost                                       nothing comes, or late; lost: the whole source
    reorder, duplicate, swap                                        behind the next; twice; what came before instead
    truncate, flip, header                                          the bytes are not what they were
    identity, layout, tokens, epoch, codec                          the header says that it is something else
    """

    kind: str
    block: int | None = None
    times: int = 1
    delay_s: float = 0.05


class Faults:
    def __init__(self, script: Sequence[Fault] = ()) -> None:
        self.set(script)

    def set(self, script: Sequence[Fault]) -> None:
        """Blocks are counted anew from here."""
        self.struck: Counter[Fault] = Counter()
        self._script = script
        self._positions: dict[object, int] = {}

    async def spoil(
        self, keys: Sequence[K], frames: AsyncGenerator[tuple[K, Frame | None]]
    ) -> AsyncGenerator[tuple[K, Frame | None]]:
        for key in keys:
            self._positions.setdefault(key, len(self._positions))
        last: Frame | None = None
        behind: tuple[K, Frame | None] | None = None
        async with aclosing(frames):
            async for key, frame in frames:
                own = None if frame is None else Frame(frame.header, memoryview(bytes(frame.payload)))
                fault = self._next(key)
                if fault is not None and fault.kind == "reorder":
                    behind, last = (key, own), own
                    continue
                if fault is None:
                    yield key, own
                else:
                    async for spoilt in _strike(fault, own, last):
                        yield key, spoilt
                if behind is not None:
                    yield behind
                behind, last = None, own
            if behind is not None:
                yield behind

    def _next(self, key: object) -> Fault | None:
        """What strikes at this key now."""
        position = self._positions.get(key)
        for fault in self._script:
            if fault.block in (None, position) and self.struck[fault] < fault.times:
                self.struck[fault] += 1
                return fault
        return None


async def _strike(fault: Fault, frame: Frame | None, last: Frame | None) -> AsyncGenerator[Frame | None]:
    if fault.kind == "lost":
        raise KVTransferError("lost, by script")
    if fault.kind == "drop":
        return
    if fault.kind == "delay":
        await asyncio.sleep(fault.delay_s)
    if frame is None or fault.kind == "absent":
        yield None
    elif fault.kind in _OTHER_BYTES:
        yield _OTHER_BYTES[fault.kind](frame, last)
    elif fault.kind in _OTHER_HEADER:
        yield Frame(pack(unpack(frame.header)._replace(**_OTHER_HEADER[fault.kind](frame))), frame.payload)
    else:
        yield frame
    if fault.kind == "duplicate":
        yield frame


def _flip(frame: Frame, last: Frame | None) -> Frame:
    payload = bytearray(frame.payload)
    payload[len(payload) // 2] ^= 1
    return Frame(frame.header, memoryview(payload))


def _swap(frame: Frame, last: Frame | None) -> Frame:
    assert last is not None, "nothing before the first block to swap it with"
    return last


_OTHER_BYTES: dict[str, Callable[[Frame, Frame | None], Frame]] = {
    "flip": _flip,
    "swap": _swap,
    "truncate": lambda frame, last: Frame(frame.header, frame.payload[:-1]),
    "header": lambda frame, last: Frame(frame.header[:-1] + bytes([frame.header[-1] ^ 1]), frame.payload),
}


def _layout(frame: Frame) -> dict[str, Any]:
    layout = unpack(frame.header).layout
    return {"layout": replace(layout, head_dim=layout.head_dim + 1)}


_OTHER_HEADER: dict[str, Callable[[Frame], dict[str, Any]]] = {
    "identity": lambda frame: {"kv_identity": b"\0" * 32},
    "layout": _layout,
    "tokens": lambda frame: {"num_tokens": unpack(frame.header).num_tokens - 1},
    "epoch": lambda frame: {"sender_epoch": "another process"},
    "codec": lambda frame: {"codec": "of tomorrow"},
}


class Faulty:
    """Everything but `fetch` is the inner connector's."""

    def __init__(self, inner: KVConnector, script: Sequence[Fault] = ()) -> None:
        self.faults = Faults(script)
        self._inner: Any = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fetch(self, *what: Any, land: Land | None = None) -> AsyncGenerator[tuple[Any, Frame | None]]:
        """`what` ends with the keys, be it a peer's or a store's. Nothing lands before it has been here."""
        return self.faults.spoil(what[-1], self._inner.fetch(*what))
