"""What goes out on connections: gathered, and written in its order."""

import asyncio
from types import SimpleNamespace
from typing import Any

from kvasir.router.http_chunks import ChunkWriter, GatheringTransport, Outbox

_MANY = 1 << 20


class Wire(asyncio.Transport):
    """The transport of a connection, and the order in which all of them are written."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        super().__init__({"name": name})
        self._name = name
        self._written = written
        self.closes = False

    def is_closing(self) -> bool:
        return self.closes

    def close(self) -> None:
        self.closes = True

    def abort(self) -> None:
        self.closes = True

    def write(self, data: Any) -> None:
        self._written.append((self._name, data))


class Connections:
    """With one outbox."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self._outbox = Outbox()

    def new(self, name: str) -> tuple[Wire, GatheringTransport]:
        wire = Wire(name, self.written)
        return wire, GatheringTransport(wire, self._outbox)


async def test_all_is_written_when_it_is_made_and_what_belongs_together_at_once() -> None:
    connections = Connections()
    (_, one), (_, other) = connections.new("one"), connections.new("other")
    one.write(b"head ")
    other.write(b"head")
    one.write(b"chunk")
    assert connections.written == []
    await asyncio.sleep(0)
    assert connections.written == [("one", b"head chunk"), ("other", b"head")]
    one.write(b"more")
    await asyncio.sleep(0)
    assert connections.written[2:] == [("one", b"more")]


async def test_with_many_connections_the_first_do_not_wait_for_the_last() -> None:
    connections = Connections()
    all_of_them = [connections.new(str(number))[1] for number in range(20)]
    for connection in all_of_them:
        connection.write(b"head ")
        connection.write(b"chunk")
    assert connections.written == [(str(number), b"head chunk") for number in range(16)]
    await asyncio.sleep(0)
    assert connections.written == [(str(number), b"head chunk") for number in range(20)]


async def test_whatever_is_bytes_is_gathered() -> None:
    connections = Connections()
    _, connection = connections.new("one")
    for part in (b"", b"head ", memoryview(b"body "), bytearray(b"end")):
        connection.write(part)
    await asyncio.sleep(0)
    assert connections.written == [("one", b"head body end")]


async def test_a_chunk_goes_out_as_http_has_it_behind_what_was_sent_before() -> None:
    connections = Connections()
    _, connection = connections.new("one")
    cycle: Any = SimpleNamespace(flow=SimpleNamespace(write_paused=False), transport=connection)
    write_chunk = ChunkWriter(cycle)
    connection.write(b"head\r\n\r\n")
    write_chunk.write(b"first")
    connection.write(b"0\r\n\r\n")
    await asyncio.sleep(0)
    assert connections.written == [("one", b"head\r\n\r\n5\r\nfirst\r\n0\r\n\r\n")]
    assert write_chunk.num_written == 1


async def test_a_connection_that_closes_sends_what_it_has_gathered_and_nothing_later() -> None:
    connections = Connections()
    wire, connection = connections.new("one")
    connection.write(b"last words")
    connection.close()
    assert connections.written == [("one", b"last words")]
    assert wire.closes
    connection.write(b"more")
    await asyncio.sleep(0)
    assert connections.written == [("one", b"last words")]


async def test_a_connection_that_has_been_lost_meanwhile_keeps_nobody_from_theirs() -> None:
    connections = Connections()
    (_, gone), (_, here) = connections.new("gone"), connections.new("here")
    gone.write(b"x")
    here.write(b"y")
    gone.abort()
    await asyncio.sleep(0)
    assert connections.written == [("here", b"y")]


async def test_much_is_not_gathered_so_that_the_transport_can_say_stop() -> None:
    connections = Connections()
    _, connection = connections.new("one")
    connection.write(b"head")
    connection.write(bytes(_MANY))
    assert [len(data) for _, data in connections.written] == [_MANY + 4]
    await asyncio.sleep(0)
    assert len(connections.written) == 1


async def test_whatever_else_one_asks_of_a_transport_is_its_own() -> None:
    wire, connection = Connections().new("one")
    assert connection.get_extra_info("name") == "one"
    assert connection.get_extra_info("peer", "nobody") == "nobody"
    assert not connection.is_closing()
    wire.close()
    assert connection.is_closing()
