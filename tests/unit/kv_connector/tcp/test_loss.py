"""A sender that is lost: what has come from it before is used all the same."""

import asyncio
import time

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import loop_socket
from kvasir.kv_connector.tcp.connector import TcpConnector
from kvasir.kv_connector.testing import LARGE, Node, Pair, open_node, random_keys
from tests.unit.kv_connector.tcp.strangers import DEADLINE_S, SECRET

NUM_BLOCKS = 40


def dies_when_it_has_lent(node: Node) -> list[int]:
    """How many blocks. All of them have come, and so has the news of the loss, before anybody looks."""
    assert isinstance(node.connector, TcpConnector)
    server = node.connector._server
    assert server is not None
    ask, num_lent = server.lender.ask, list[int]()

    def ask_and_die(*asked: object) -> None:
        ask(*asked)  # type: ignore[arg-type]
        while not all(loan.is_over for loan in server.lender._loans):  # on the event loop, which is the receiver's too
            time.sleep(0.01)
        num_lent.append(len(server.lender._loans))
        server._socket.close()
        time.sleep(0.3)

    server.lender.ask = ask_and_die  # type: ignore[method-assign]
    return num_lent


@pytest.mark.parametrize("window", [NUM_BLOCKS, 8], ids=["all were asked for", "more are to be asked for"])
async def test_blocks_that_have_come_whole_are_used(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_socket, "_MESSAGES_A_TURN", 2)  # there is more to read than is read in one go
    bytes_per_block = LARGE.bytes_per_block * 4 // 3  # as packed by the worst codec
    settings = ConnectorSettings(name="tcp", secret=SECRET, window_bytes=window * bytes_per_block)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, LARGE, seed=1) as sender,
        open_node(settings, LARGE, seed=2) as receiver,
    ):
        num_lent = dies_when_it_has_lent(sender)
        pair, keys = Pair(sender, receiver), random_keys(NUM_BLOCKS)
        ticket = pair.ticket()
        await sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(NUM_BLOCKS, committed=True)
        result = await transfer.done()
        assert [len(pair.landed)] == [result.num_fetched] == num_lent
        assert len(pair.landed) > 4
        assert all(pair.is_equal(index) for index in pair.landed)
