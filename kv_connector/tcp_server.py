"""The sending end of the tcp connector: a ROUTER that lends blocks, without a copy, to receivers that ask for them.

    asked for --> queued --> lent --> given back       when ZeroMQ has let go of the block
                    |
                    +--> answered ABSENT               not there, or the receiver has asked for too many

Bounded for each receiver (`MAX_REQUESTS_PER_PEER`: asked for and lent) and in total (`_MAX_LENT`: lent). Small blocks
are lent by way of a few trays, into which they are copied; where all trays are on their way, one by one as large ones.
"""

import asyncio
import hmac
import logging
import os
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from kvasir.common.secrets import is_loopback
from kvasir.kv_connector import tcp_protocol as protocol
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, TransferId
from kvasir.kv_connector.tcp_door import Doorkeeper
from kvasir.kv_connector.tcp_socket import LoopSocket

log = logging.getLogger(__name__)

_NUM_PEERS_REMEMBERED = 1024
_MAX_LENT = 2048
_MAX_UNREAD = 1024  # replies to one receiver; of blocks there are fewer
_BYTES_A_TURN = 1 << 20  # lent before it is the event loop's turn
_NUM_TRAYS = 16
_LOOPBACK_BUFFER_BYTES = 256 << 10  # what both ends copy through stays in the processor's cache
_POLL_S = 0.005  # how soon it is seen that zmq has let go of a block
_CLOSE_TIMEOUT_S = 5.0


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


class TcpServer:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[Any]]",
        source: BlockSource,
        max_payload_bytes: int,
        keys: protocol.Keys,
        is_encrypted: bool,
    ) -> None:
        self._context = context
        self._source = source
        self._keys = keys
        self._is_encrypted = is_encrypted
        self._nonce_key = os.urandom(32)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # peers that have shown that they know the secret
        self._queue: deque[_Request] = deque()
        self._loans: list[_Loan] = []
        self._num_lent = 0  # blocks
        self._max_payload_bytes = max_payload_bytes
        num_trays = _NUM_TRAYS if max_payload_bytes <= protocol.SMALL_BYTES else 0
        self._trays = [memoryview(bytearray(protocol.TRAY_BYTES)) for _ in range(num_trays)]  # that are free
        self._num_held: Counter[bytes] = Counter()  # by each peer: queued or lent
        self._has_loans = asyncio.Event()
        self._next_lending: asyncio.Handle | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._words: dict[bytes, tuple[bool, Callable[[bytes, bytes], None]]] = {  # the bool: of known peers only
            protocol.HELLO: (False, self._hello),
            protocol.ANSWER: (False, self._answer),
            protocol.FETCH: (True, self._fetch),
            protocol.RELEASE: (True, self._release),
            protocol.KEEP_ALIVE: (True, self._keep_alive),
        }

    def bind(self, host: str, port: int) -> int:
        """Listen there, and return the port."""
        socket = self._context.socket(zmq.ROUTER)
        protocol.configure(socket, protocol.MAX_REQUEST_BYTES, ":" in host)
        protocol.guard_sender(socket, self._keys, self._is_encrypted)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.RCVHWM, protocol.MAX_REQUESTS_PER_PEER)
        socket.set(zmq.SNDHWM, _MAX_UNREAD)
        if is_loopback(host):
            socket.set(zmq.SNDBUF, _LOOPBACK_BUFFER_BYTES)
        if not self._is_encrypted:
            self._doorkeeper = Doorkeeper(self._context, protocol.USER, self._keys.password)
        self._socket = LoopSocket(socket, self._take)
        socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._collecting = asyncio.create_task(self._collect())
        bound_to = str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        return int(bound_to.rpartition(":")[2])

    async def close(self) -> None:
        self._collecting.cancel()
        if self._next_lending is not None:
            self._next_lending.cancel()
        self._socket.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        deadline_s = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT_S
        while self._loans and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
            self._take_back()
        if self._loans:
            log.error("zmq still holds %d blocks; they are not reused", self._num_lent)

    # Requests.

    def _take(self, message: list[zmq.Frame]) -> None:
        peer, *frames = (frame.bytes for frame in message)
        request = frames[0] if len(frames) == 1 else b""
        of_known_only, handle = self._words.get(request[:1], (True, None))
        if handle is None or (of_known_only and peer not in self._known):
            log.debug("a peer sent something that is not for us: %r", request[:16])
            self._send(peer, protocol.REFUSED)
            return
        try:
            handle(peer, request[1:])
        except Exception:  # a bug of ours must not end the service of all others
            log.exception("a request of a receiver failed in an unforeseen way")

    def _hello(self, peer: bytes, receiver_nonce: bytes) -> None:
        if len(receiver_nonce) != protocol.NONCE_BYTES:
            self._send(peer, protocol.REFUSED)
            return
        nonce = self._nonce(peer)
        self._send(peer, protocol.CHALLENGE + nonce + self._keys.proof(protocol.SENDER, receiver_nonce, nonce))

    def _answer(self, peer: bytes, answer: bytes) -> None:
        receiver_nonce, proof = answer[: protocol.NONCE_BYTES], answer[protocol.NONCE_BYTES :]
        wanted = self._keys.proof(protocol.RECEIVER, receiver_nonce, self._nonce(peer))
        if not hmac.compare_digest(wanted, proof):
            log.warning("refused a receiver that does not know the cluster's secret")
            self._send(peer, protocol.REFUSED)
            return
        self._known[peer] = None
        if len(self._known) > _NUM_PEERS_REMEMBERED:
            self._known.popitem(last=False)
        self._send(peer, protocol.WELCOME)

    def _fetch(self, peer: bytes, request: bytes) -> None:
        fetch = protocol.parse_fetch(request)
        if fetch is None:
            self._send(peer, protocol.REFUSED)
            return
        first_number, transfer_id, keys = fetch
        self._known.move_to_end(peer)
        if self._num_held[peer] + len(keys) > protocol.MAX_REQUESTS_PER_PEER:
            self._take_back()  # what a fast receiver has had already must not make it too many
        for number, key in enumerate(keys, first_number):
            if self._num_held[peer] < protocol.MAX_REQUESTS_PER_PEER:
                self._num_held[peer] += 1
                self._queue.append(_Request(peer, protocol.number(number), transfer_id, key))
            else:
                self._send(peer, protocol.ABSENT + protocol.number(number))
        self._lend()

    def _release(self, peer: bytes, transfer: bytes) -> None:
        self._source.released(TransferId(transfer.decode(errors="replace")))

    def _keep_alive(self, peer: bytes, transfer: bytes) -> None:
        self._source.keep_alive(TransferId(transfer.decode(errors="replace")))

    def _send(self, peer: bytes, *reply: bytes | memoryview) -> bool:
        """Never waits: who does not read, or has gone, gets nothing."""
        try:
            self._socket.send(peer, *reply)
        except zmq.ZMQError as error:
            log.debug("a reply found no taker: %s", error)
            self._known.pop(peer, None)
            return False
        return True

    def _nonce(self, peer: bytes) -> bytes:
        """Of this connection and this process; zmq gives each connection a name of its own."""
        return hmac.digest(self._nonce_key, peer, "sha256")

    # Lending.

    def _lend(self) -> None:
        if self._next_lending is not None:
            self._next_lending.cancel()
            self._next_lending = None
        if self._loans and not self._trays:
            self._take_back()
        num_bytes = 0
        while self._queue and self._num_lent < _MAX_LENT:
            if num_bytes >= _BYTES_A_TURN:
                self._next_lending = asyncio.get_running_loop().call_soon(self._lend)
                return
            num_bytes += self._lend_tray(self._trays.pop()) if self._trays else self._lend_one()

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
            if self._num_lent + len(requests) >= _MAX_LENT:
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
        self._num_lent += len(requests)
        if self._send(requests[0].peer, head, view):
            self._loans.append(loan)
            self._has_loans.set()
        else:
            self._end(loan)

    def _borrow(self, request: _Request) -> Frame | None:
        """None, and the peer has been told, if it cannot be had."""
        frame = None
        if request.peer in self._known:
            try:
                frame = self._source.borrow(request.transfer_id, request.key)
            except Exception:  # a bug of ours must not end the service of all others
                log.exception("a block could not be lent")
        if frame is None:
            self._let_go(request)
            self._send(request.peer, protocol.ABSENT + request.number)
        return frame

    def _let_go(self, request: _Request) -> None:
        self._num_held[request.peer] -= 1
        if not self._num_held[request.peer]:
            del self._num_held[request.peer]

    # Blocks that zmq still reads.

    async def _collect(self) -> None:
        while True:
            await self._has_loans.wait()
            self._take_back()
            self._lend()
            if not self._loans:
                self._has_loans.clear()
            await asyncio.sleep(_POLL_S)
            self._socket.look()  # zmq lets go of a lost peer's messages only when it is called

    def _take_back(self) -> None:
        over = [loan for loan in self._loans if loan.is_over]
        if over:
            self._loans = [loan for loan in self._loans if not loan.is_over]
        for loan in over:
            self._end(loan)

    def _end(self, loan: _Loan) -> None:
        if loan.tray is not None:
            self._trays.append(loan.tray)
        self._num_lent -= len(loan.requests)
        for request in loan.requests:
            self._let_go(request)
            self._source.give_back(request.transfer_id, request.key)
