"""Blocks lent to ZeroMQ without a copy, until ZeroMQ has let go of them.

    asked for --> late --> queued --> lent --> given back      when ZeroMQ has let go of the block
                    |        |
                    +--------+--> answered ABSENT              too many requests; or the block is not there

Bounds: each receiver may have `MAX_REQUESTS_PER_PEER` blocks queued or lent, and as many late requests again; all
receivers together may have `_MAX_LENT` blocks lent.

Why there are late requests: ZeroMQ lets go of a block on a thread of its own, and Python notices some time later. Until
then, blocks that a fast receiver has already had still count against it. Its next requests wait as late ones, and are
not refused.

Small blocks are copied into one of a few trays, which is lent as a whole. While all trays are lent, small blocks are
lent one by one as large ones are.
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
_BYTES_A_TURN = 2 << 20  # lent before the event loop may do other work
_NUM_TRAYS = 16

Send = Callable[..., bool]  # (peer, *frames) -> whether ZeroMQ has taken the message


class _Request(NamedTuple):
    peer: bytes
    number: bytes
    transfer_id: TransferId
    key: BlockKey


@dataclass(frozen=True, slots=True)
class _Loan:
    """One message that ZeroMQ holds. It holds the view for as long as it reads it, so a dead view ends the loan."""

    requests: list[_Request]
    view: "weakref.ref[memoryview]"
    tray: memoryview | None

    @property
    def is_over(self) -> bool:
        return self.view() is None


class Lender:
    """`send` never waits, and lends ZeroMQ the memoryviews it is given. Peers that are not `is_known` get no block."""

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
        self._num_held: Counter[bytes] = Counter()  # by peer: blocks queued or lent
        self._late: dict[bytes, deque[_Request]] = {}  # by peer; only of peers that hold as many as they may
        self._loans: list[_Loan] = []
        self._has_trays = max_payload_bytes <= protocol.SMALL_BYTES
        num_trays = _NUM_TRAYS if self._has_trays else 0
        self._trays = [memoryview(bytearray(protocol.TRAY_BYTES)) for _ in range(num_trays)]  # the free ones
        self._next_turn: asyncio.Handle | None = None

    def ask(self, peer: bytes, first_number: int, transfer_id: TransferId, keys: Sequence[BlockKey]) -> None:
        """A receiver wants these blocks. Each will be answered: at once, or when there is room."""
        if self._num_held[peer] + len(keys) > protocol.MAX_REQUESTS_PER_PEER:
            self.take_back()  # blocks that the receiver has already had must not count against it
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
        """Lend queued blocks as far as there is room; the rest at a later turn of the event loop."""
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
        """Lend nothing until `lend` is called again."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def take_back(self) -> None:
        """Give back to the source what ZeroMQ has let go of."""
        over = [loan for loan in self._loans if loan.is_over]
        if over:
            self._loans = [loan for loan in self._loans if not loan.is_over]
        for loan in over:
            self._end(loan)
        if not self._loans:
            self.has_loans.clear()

    def _lend_one(self) -> int:
        """Lend the next block. Returns its bytes; 0 if it is not there."""
        request = self._queue.popleft()
        frame = self._borrow(request)
        if frame is None:
            return 0
        self._lend_view([request], protocol.BLOCK + request.number + frame.header, memoryview(frame.payload))
        return frame.payload.nbytes

    def _lend_tray(self, tray: memoryview) -> int:
        """Copy the next blocks of one peer into the tray, as many as fit, and lend it. Returns the bytes copied."""
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
        """The block's frame; None if it is not there, and then the peer has been answered."""
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
        """Free the request's place: for the peer's first late request, if there is one."""
        late = self._late.get(request.peer)
        if late:
            self._queue.append(late.popleft())
            if not late:
                del self._late[request.peer]
            return
        self._num_held[request.peer] -= 1
        if not self._num_held[request.peer]:
            del self._num_held[request.peer]
