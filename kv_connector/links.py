"""The links of a peer connector: one to each sender, by its address, which all transfers from there share.

A link is never repaired. Any error on it fails every fetch that is waiting, and the next fetch opens a new link.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.back_off import BackOff
from kvasir.kv_connector.base import Ticket

_LET_GO_TIMEOUT_S = 2.0
_MAX_HANGING = 8  # each holds a staging buffer


class Link(Protocol):
    """The receiving end of one connection, from the handshake to the first error."""

    ended: asyncio.Event  # nothing is written to its memory any more; that may be long after its loss, or never

    @property
    def why_lost(self) -> str: ...  # empty while the link is alive
    async def connect(self) -> None: ...  # until each side has proved that it knows the secret; KVTransferError: lost
    def say(self, *fields: bytes) -> None: ...  # best effort; never waits
    def close(self, why: str) -> None: ...  # fails everything that waits


L = TypeVar("L", bound=Link)


class Links(Generic[L]):
    """`new_link(address)` makes a link that is not connected yet."""

    def __init__(self, new_link: Callable[[str], L]) -> None:
        self._new_link = new_link
        self._links: dict[str, tuple[L, asyncio.Task[None]]] = {}
        self._hanging: set[L] = set()  # lost and replaced; others may still write to their memory
        self._back_off = BackOff(time.monotonic)

    async def of(self, ticket: Ticket) -> L:
        """The link to the ticket's sender. Raises KVTransferError."""
        if not ticket.endpoints:
            raise KVTransferError(f"ticket {ticket.transfer_id} names no endpoint")
        return await self._to(ticket.endpoints[0].address)

    async def say(self, ticket: Ticket, word: bytes) -> None:
        """Tell every endpoint of the ticket, but those whose link is lost. Raises KVTransferError."""
        for endpoint in ticket.endpoints:
            known = self._links.get(endpoint.address)
            if known is None or not known[0].why_lost:
                (await self._to(endpoint.address)).say(word, ticket.transfer_id.encode())

    def close(self) -> None:
        for link, connecting in self._links.values():
            connecting.cancel()
            link.close("this node closes")

    async def ended(self) -> None:
        """Returns when nothing is written to the memory of the links that were closed."""
        await asyncio.gather(*(link.ended.wait() for link, _ in self._links.values()))

    async def _to(self, address: str) -> L:
        known = self._links.get(address)
        if known is not None and known[0].why_lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LET_GO_TIMEOUT_S):
                    await known[0].ended.wait()
            if self._links.get(address) is known:
                del self._links[address]
                self._hanging.add(known[0])
        if address not in self._links:
            self._forget_ended()
            self._back_off.check(address)
            link = self._new_link(address)
            connecting = asyncio.create_task(self._connect(link, address))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
            self._links[address] = link, connecting
        link, connecting = self._links[address]
        await asyncio.shield(connecting)
        return link

    async def _connect(self, link: L, address: str) -> None:
        try:
            await link.connect()
        except KVTransferError as error:
            self._back_off.failed(address, error)
            raise
        self._back_off.worked(address)

    def _forget_ended(self) -> None:
        """Bound the memory that lost links hold, however often peers are lost. KVTransferError: too many hang."""
        self._links = {address: known for address, known in self._links.items() if not known[0].ended.is_set()}
        self._hanging = {link for link in self._hanging if not link.ended.is_set()}
        if len(self._hanging) >= _MAX_HANGING:
            raise KVTransferError(f"reads from {_MAX_HANGING} lost peers hang; no new ones are begun")
