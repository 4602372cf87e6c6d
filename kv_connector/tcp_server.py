"""The sending end of the tcp connector: a ROUTER that lends blocks, without a copy, to receivers that ask for them."""

import asyncio
import hmac
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from kvasir.kv_connector import tcp_protocol as protocol
from kvasir.kv_connector.base import BlockKey, BlockSource, TransferId

log = logging.getLogger(__name__)

_NUM_PEERS_REMEMBERED = 1024
_POLL_S = 0.005  # how soon it is seen that zmq has let go of a block
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Loan:
    peer: bytes
    transfer_id: TransferId
    key: BlockKey
    tracker: zmq.MessageTracker


class TcpServer:
    def __init__(self, context: zmq.asyncio.Context, source: BlockSource, secret: str) -> None:
        self._source = source
        self._secret = secret
        self._nonce_key = os.urandom(32)
        self._socket = context.socket(zmq.ROUTER)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # peers that have shown that they know the secret
        self._loans: list[_Loan] = []
        self._num_lent: Counter[bytes] = Counter()
        self._has_loans = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self, host: str, port: int) -> int:
        """Listen there, and return the port."""
        protocol.configure(self._socket, protocol.MAX_REQUEST_BYTES, ":" in host)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._collect())]
        bound_to = str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        return int(bound_to.rpartition(":")[2])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        deadline_s = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT_S
        while self._loans and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
            self._take_back()
        if self._loans:
            log.error("zmq still holds %d blocks; they are not reused", len(self._loans))

    # Requests.

    async def _serve(self) -> None:
        words: dict[bytes, tuple[int, Callable[..., Coroutine[Any, Any, None]]]] = {
            protocol.HELLO: (1, self._hello),
            protocol.ANSWER: (2, self._answer),
        }
        words_of_known: dict[bytes, tuple[int, Callable[..., Coroutine[Any, Any, None]]]] = {
            protocol.FETCH: (3, self._fetch),
            protocol.RELEASE: (1, self._release),
            protocol.KEEP_ALIVE: (1, self._keep_alive),
        }
        while True:
            peer, *message = await self._socket.recv_multipart()
            word, arguments = (message[0], message[1:]) if message else (b"", [])
            num_arguments, handle = words.get(word) or words_of_known.get(word) or (-1, None)
            if (
                handle is None
                or len(arguments) != num_arguments
                or (word in words_of_known and peer not in self._known)
            ):
                log.debug("a peer sent something that is not for us: %r", word[:16])
                await self._send(peer, protocol.REFUSED)
                continue
            try:
                await handle(peer, *arguments)
            except Exception:  # a bug of ours must not end the service of all others
                log.exception("a request of a receiver failed in an unforeseen way")

    async def _hello(self, peer: bytes, receiver_nonce: bytes) -> None:
        nonce = self._nonce(peer)
        own_proof = protocol.proof(self._secret, protocol.SENDER, receiver_nonce, nonce)
        await self._send(peer, protocol.CHALLENGE, nonce, own_proof)

    async def _answer(self, peer: bytes, receiver_nonce: bytes, proof: bytes) -> None:
        wanted = protocol.proof(self._secret, protocol.RECEIVER, receiver_nonce, self._nonce(peer))
        if len(receiver_nonce) != protocol.NONCE_BYTES or not hmac.compare_digest(wanted, proof):
            log.warning("refused a receiver that does not know the cluster's secret")
            await self._send(peer, protocol.REFUSED)
            return
        self._known[peer] = None
        if len(self._known) > _NUM_PEERS_REMEMBERED:
            self._known.popitem(last=False)
        await self._send(peer, protocol.WELCOME)

    async def _fetch(self, peer: bytes, request: bytes, transfer: bytes, raw_key: bytes) -> None:
        transfer_id, key = TransferId(transfer.decode(errors="replace")), BlockKey(raw_key)
        self._known.move_to_end(peer)
        frame = self._source.borrow(transfer_id, key) if self._num_lent[peer] < protocol.MAX_REQUESTS_PER_PEER else None
        if frame is None:
            await self._send(peer, protocol.ABSENT, request)
            return
        tracker = await self._send(peer, protocol.BLOCK, request, frame.header, frame.payload)
        if tracker is None:
            self._source.give_back(transfer_id, key)
            return
        self._loans.append(_Loan(peer, transfer_id, key, tracker))
        self._num_lent[peer] += 1
        self._has_loans.set()

    async def _release(self, peer: bytes, transfer: bytes) -> None:
        self._source.released(TransferId(transfer.decode(errors="replace")))

    async def _keep_alive(self, peer: bytes, transfer: bytes) -> None:
        self._source.keep_alive(TransferId(transfer.decode(errors="replace")))

    async def _send(self, peer: bytes, *frames: bytes | memoryview) -> zmq.MessageTracker | None:
        """Never waits: who does not read, or has gone, gets nothing. Returns what follows the last frame."""
        try:
            return await self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            log.debug("a reply found no taker: %s", error)
            self._known.pop(peer, None)
            return None

    def _nonce(self, peer: bytes) -> bytes:
        """Of this connection and this process; zmq gives each connection a name of its own."""
        return hmac.digest(self._nonce_key, peer, "sha256")

    # Blocks that zmq still reads.

    async def _collect(self) -> None:
        while True:
            await self._has_loans.wait()
            self._take_back()
            if not self._loans:
                self._has_loans.clear()
            await asyncio.sleep(_POLL_S)
            self._socket.get(zmq.EVENTS)  # zmq lets go of a lost peer's messages only when it is called

    def _take_back(self) -> None:
        done = [loan for loan in self._loans if loan.tracker.done]
        self._loans = [loan for loan in self._loans if not loan.tracker.done]
        for loan in done:
            self._num_lent[loan.peer] -= 1
            if not self._num_lent[loan.peer]:
                del self._num_lent[loan.peer]
            self._source.give_back(loan.transfer_id, loan.key)
