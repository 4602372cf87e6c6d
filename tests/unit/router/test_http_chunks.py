"""Chunks of many connections, written together."""

import asyncio
from types import SimpleNamespace
from typing import Any

from kvasir.router.http_chunks import ChunkWriter, Outbox


class Wire:
    """A connection's transport, and the order in which all of them are written."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self._name = name
        self._written = written
        self.closes = False

    def is_closing(self) -> bool:
        return self.closes

    def write(self, data: bytes) -> None:
        self._written.append((self._name, data))


def a_writer(wire: Wire, outbox: Outbox) -> ChunkWriter:
    cycle: Any = SimpleNamespace(flow=SimpleNamespace(write_paused=False), transport=wire)
    return ChunkWriter(cycle, outbox)


async def test_chunks_are_written_when_all_are_made_and_in_their_order() -> None:
    written: list[tuple[str, bytes]] = []
    outbox = Outbox()
    one, other = (a_writer(Wire(name, written), outbox) for name in ("one", "other"))
    one(b"first")
    other(b"second")
    one(b"third")
    assert written == []
    await asyncio.sleep(0)
    assert written == [("one", b"5\r\nfirst\r\n"), ("other", b"6\r\nsecond\r\n"), ("one", b"5\r\nthird\r\n")]
    other(b"")
    await asyncio.sleep(0)
    assert len(written) == 4


async def test_what_comes_another_way_comes_behind_them() -> None:
    written: list[tuple[str, bytes]] = []
    wire = Wire("one", written)
    writer = a_writer(wire, Outbox())
    writer(b"early")
    writer.flush()
    wire.write(b"late")
    await asyncio.sleep(0)
    assert [data for _, data in written] == [b"5\r\nearly\r\n", b"late"]


async def test_a_connection_that_has_closed_meanwhile_keeps_nobody_from_theirs() -> None:
    written: list[tuple[str, bytes]] = []
    outbox = Outbox()
    gone, here = Wire("gone", written), Wire("here", written)
    a_writer(gone, outbox)(b"x")
    a_writer(here, outbox)(b"y")
    gone.closes = True
    await asyncio.sleep(0)
    assert written == [("here", b"1\r\ny\r\n")]
