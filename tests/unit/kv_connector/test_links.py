"""One link to each sender, whatever becomes of it: shared, replaced when it is lost, and bounded in number."""

import asyncio
import itertools

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector import back_off, links
from kvasir.kv_connector.base import Endpoint, Ticket, TransferId
from kvasir.kv_connector.links import Links


class FakeLink:
    """Connects at once, or never if `is_reachable` says so. Ends when told to."""

    is_reachable = True

    def __init__(self, address: str) -> None:
        self.why_lost = ""
        self.ended = asyncio.Event()
        self.said: list[tuple[bytes, ...]] = []

    async def connect(self) -> None:
        await asyncio.sleep(0)
        if not self.is_reachable:
            self.close("nobody listens there")
            self.ended.set()
            raise KVTransferError(self.why_lost)

    def say(self, *fields: bytes) -> None:
        self.said.append(fields)

    def close(self, why: str) -> None:
        self.why_lost = why


def ticket_for(*addresses: str) -> Ticket:
    return Ticket(transfer_id=TransferId("t"), connector="tcp", endpoints=tuple(map(Endpoint, addresses)))


@pytest.fixture(autouse=True)
def not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LET_GO_TIMEOUT_S", 0.01)


async def test_all_who_come_at_once_share_one_link() -> None:
    to = Links(FakeLink)
    first, *others = await asyncio.gather(*(to.of(ticket_for("a")) for _ in range(5)))
    assert all(link is first for link in others)
    assert await to.of(ticket_for("b")) is not first


async def test_a_ticket_without_an_endpoint_leads_nowhere() -> None:
    with pytest.raises(KVTransferError, match="names no endpoint"):
        await Links(FakeLink).of(ticket_for())


async def test_a_lost_link_is_replaced_once_for_all_who_want_it() -> None:
    to = Links(FakeLink)
    lost = await to.of(ticket_for("a"))
    lost.close("gone")
    asyncio.get_running_loop().call_later(0.001, lost.ended.set)
    one, other = await asyncio.gather(to.of(ticket_for("a")), to.of(ticket_for("a")))
    assert one is other is not lost


async def test_a_lost_link_is_not_told_and_not_replaced_for_that() -> None:
    to = Links(FakeLink)
    lost, other = await to.of(ticket_for("a")), await to.of(ticket_for("b"))
    lost.close("gone")
    await to.say(ticket_for("a", "b"), b"R")
    assert (lost.said, other.said) == ([], [(b"R", b"t")])


async def test_lost_links_that_hang_are_few() -> None:
    to = Links(FakeLink)
    hanging: list[FakeLink] = []
    with pytest.raises(KVTransferError, match="8 lost peers hang"):
        for _ in itertools.count():
            hanging.append(await to.of(ticket_for("a")))
            hanging[-1].close("gone")
    assert len(hanging) == 8
    hanging[3].ended.set()
    await to.of(ticket_for("a"))


async def test_lost_links_are_forgotten() -> None:
    to = Links(FakeLink)
    for number in range(50):
        link = await to.of(ticket_for(f"a:{number}"))
        link.close("gone")
        link.ended.set()
    assert len(to._links) == 1


async def test_who_cannot_be_reached_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_off, "_FIRST_S", 3600.0)
    to = Links(FakeLink)
    monkeypatch.setattr(FakeLink, "is_reachable", False)
    with pytest.raises(KVTransferError, match=r"nobody listens there$"):
        await to.of(ticket_for("a"))
    monkeypatch.setattr(FakeLink, "is_reachable", True)
    with pytest.raises(KVTransferError, match=r"nobody listens there; it is tried again in"):
        await to.of(ticket_for("a"))
    await to.of(ticket_for("b"))
