"""Blocks lent to ZeroMQ, without a copy, until it has let go of them.

    asked for --> late --> queued --> lent --> given back      when ZeroMQ has let go of the block
                    |        |
                    +--------+--> answered ABSENT              the receiver has asked for too many; it is not there

Bounded for each receiver (`MAX_REQUESTS_PER_PEER`: queued and lent, and as many late ones) and in total (`_MAX_LENT`:
lent). Late is what finds no room beside blocks that the receiver may have had long ago: Python hears of that on a
thread, when that has its turn. Small blocks are lent by way of a few trays, into which they are copied; where all
trays are on their way, one by one as large ones.
"""

import asyncio
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, TransferId
from kvasir.kv_connector.tcp import protocol

log = logging.getLogger(__name__)

_MAX_LENT = 2048
_BYTES_A_TURN = 2 << 20  # lent before it is the event loop's turn
_NUM_TRAYS = 16

Send = Callable[..., bool]  # to a peer, some frames; whether it has taken them


class _Request(NamedTuple):
    peer: bytes
    number: bytes
    transfer_id: TransferId
    key: BlockKey


@dataclass(frozen=True, slots=True)
class _Loan:
    """Over when the view is gone, which zmq holds for as long as it reads it."""

    requests: list[_Request]
    view: "weakref.ref[memoryview]"
    tray: memoryview | None

    @property
    def is_over(self) -> bool:
        return self.view() is None


class Lender:
    """`send` never waits, and lends a view that it is given; to whom `is_known` says no, nothing more is lent."""

    def __init__(
        self, source: BlockSource, max_payload_bytes: int, send: Send, is_known: Callable[[bytes], bool]
    ) -> None:
        self.has_loans = asyncio.Event()
        self.num_lent = 0  # blocks
        self._source = source
        self._max_payload_bytes = max_payload_bytes
        self._send = send
        self._is_known = is_known
        self._queue: deque[_Request] = deque()
        self._num_held: Counter[bytes] = Counter()  # by each peer: queued or lent
        self._late: dict[bytes, deque[_Request]] = {}  # of peers that hold as many as they may
        self._loans: list[_Loan] = []
        self._has_trays = max_payload_bytes <= protocol.SMALL_BYTES
        num_trays = _NUM_TRAYS if self._has_trays else 0
        self._trays = [memoryview(bytearray(protocol.TRAY_BYTES)) for _ in range(num_trays)]  # that are free
        self._next_turn: asyncio.Handle | None = None

    def ask(self, peer: bytes, first_number: int, transfer_id: TransferId, keys: Sequence[BlockKey]) -> None:
        """For these blocks; each is answered, soon or when there is room."""
        if self._num_held[peer] + len(keys) > protocol.MAX_REQUESTS_PER_PEER:
            self.take_back()  # what a fast receiver has had already must not make it too many
        for value, key in enumerate(keys, first_number):
            request = _Request(peer, protocol.number(value), transfer_id, key)
            if self._num_held[peer] < protocol.MAX_REQUESTS_PER_PEER:
                self._num_held[peer] += 1
                self._queue.append(request)
            elif len(late := self._late.setdefault(peer, deque())) < protocol.MAX_REQUESTS_PER_PEER:
                late.append(request)
            else:
                self._send(peer, protocol.ABSENT + request.number)
        self.lend()

    def lend(self) -> None:
        """What waits, as far as there is room."""
        self.stop()
        if self._has_trays and not self._trays:
            self.take_back()
        num_bytes = 0
        while self._queue and self.num_lent < _MAX_LENT:
            if num_bytes >= _BYTES_A_TURN:
                self._next_turn = asyncio.get_running_loop().call_soon(self.lend)
                return
            num_bytes += self._lend_tray(self._trays.pop()) if self._trays else self._lend_one()

    def stop(self) -> None:
        """Until `lend` is called again."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def take_back(self) -> None:
        """What zmq has let go of."""
        over = [loan for loan in self._loans if loan.is_over]
        if over:
            self._loans = [loan for loan in self._loans if not loan.is_over]
        for loan in over:
            self._end(loan)
        if not self._loans:
            self.has_loans.clear()

    def _lend_one(self) -> int:
        """The next block; how many bytes it has."""
        request = self._queue.popleft()
        frame = self._borrow(request)
        if frame is None:
            return 0
        self._lend_view([request], protocol.BLOCK + request.number + frame.header, memoryview(frame.payload))
        return frame.payload.nbytes

    def _lend_tray(self, tray: memoryview) -> int:
        """As many blocks as find room, of those that the peer whose turn it is has asked for next."""
        peer, entries, num_bytes = self._queue[0].peer, [protocol.TRAY], 0
        requests: list[_Request] = []
        while self._queue and self._queue[0].peer == peer and num_bytes <= tray.nbytes - self._max_payload_bytes:
            if self.num_lent + len(requests) >= _MAX_LENT:
                break
            request = self._queue.popleft()
            frame = self._borrow(request)
            if frame is not None:
                requests.append(request)
                entries.append(protocol.entry(request.number, frame))
                tray[num_bytes : num_bytes + frame.payload.nbytes] = frame.payload
                num_bytes += frame.payload.nbytes
        if requests:
            self._lend_view(requests, b"".join(entries), tray[:num_bytes], tray)
        else:
            self._trays.append(tray)
        return num_bytes

    def _lend_view(
        self, requests: list[_Request], head: bytes, view: memoryview, tray: memoryview | None = None
    ) -> None:
        loan = _Loan(requests, weakref.ref(view), tray)
        self.num_lent += len(requests)
        if self._send(requests[0].peer, head, view):
            self._loans.append(loan)
            self.has_loans.set()
        else:
            self._end(loan)

    def _borrow(self, request: _Request) -> Frame | None:
        """None, and the peer has been told, if it cannot be had."""
        frame = None
        if self._is_known(request.peer):
            try:
                frame = self._source.borrow(request.transfer_id, request.key)
            except Exception:  # a bug of ours must not end the service of all others
                log.exception("a block could not be lent")
        if frame is None:
            self._let_go(request)
            self._send(request.peer, protocol.ABSENT + request.number)
        return frame

    def _end(self, loan: _Loan) -> None:
        if loan.tray is not None:
            self._trays.append(loan.tray)
        self.num_lent -= len(loan.requests)
        for request in loan.requests:
            self._let_go(request)
            self._source.give_back(request.transfer_id, request.key)

    def _let_go(self, request: _Request) -> None:
        """The room that it took is free: for the peer's first late one, if there is any."""
        late = self._late.get(request.peer)
        if late:
            self._queue.append(late.popleft())
            if not late:
                del self._late[request.peer]
            return
        self._num_held[request.peer] -= 1
        if not self._num_held[request.peer]:
            del self._num_held[request.peer]
