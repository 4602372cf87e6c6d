"""One request on one node: its handle there, the room reserved for it, and the way to end it."""

from collections.abc import Callable
from functools import partial

from kvasir.router import wire
from kvasir.router.node_events import Event
from kvasir.router.nodes import Role
from kvasir.router.pool import Reservation


class Leg:
    """`heard` is called with every event of it, until `close`."""

    __slots__ = ("_is_open", "_session", "address", "handle", "has_ended", "node", "reservation")

    def __init__(self, reservation: Reservation, heard: Callable[["Leg", Event], None]) -> None:
        self.reservation = reservation
        self.node = reservation.node
        self.address = self.node.info.address
        self.has_ended = False  # the node has said its last word of the request
        self._session = self.node.session
        self._is_open = True
        self.handle = self._session.begin(partial(heard, self))

    def send(self, command: wire.Command) -> None:
        self._session.send(command)

    def close(self) -> None:
        """Leave nothing on the node. Harmless the second time."""
        if not self._is_open:
            return
        self._is_open = False
        role = self.node.info.role
        if not self.has_ended:
            self.send(wire.cancel(role, self.handle))
        elif role is Role.PREFILL:
            self.send(wire.release_ticket(self.handle))
        self._session.forget(self.handle)
        self.reservation.release()
