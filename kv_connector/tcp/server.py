"""The sending end of the tcp connector: a ROUTER socket that serves blocks to receivers that know the secret."""

import asyncio
import hmac
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import zmq

from kvasir.common.addresses import join_address
from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.base import BlockSource, TransferId
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.tcp.doorkeeper import Doorkeeper
from kvasir.kv_connector.tcp.lending import Lender
from kvasir.kv_connector.tcp.loop_socket import LoopSocket

log = logging.getLogger(__name__)

_NUM_PEERS_REMEMBERED = 1024
_MAX_UNREAD = 1024  # replies queued for one receiver; `Lender` bounds how many of them are blocks
_LOOPBACK_BUFFER_BYTES = 256 << 10  # so small that what both ends copy through it stays in the CPU's cache
_POLL_S = 0.005  # how soon we notice that zmq has let go of a block
_CLOSE_TIMEOUT_S = 5.0


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
        self._known: OrderedDict[bytes, None] = OrderedDict()  # peers that have proved the secret, least recent first
        self.lender = Lender(source, max_payload_bytes, self._send, self._known.__contains__)
        self._doorkeeper: Doorkeeper | None = None
        self._words: dict[bytes, tuple[bool, Callable[[bytes, bytes], None]]] = {  # the bool: for known peers only
            protocol.HELLO: (False, self._hello),
            protocol.ANSWER: (False, self._answer),
            protocol.FETCH: (True, self._fetch),
            protocol.RELEASE: (True, self._release),
            protocol.KEEP_ALIVE: (True, self._keep_alive),
        }

    def bind(self, host: str, port: int) -> int:
        """Listen there, and return the port. Raises OSError if it is taken."""
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
        try:
            socket.bind(f"tcp://{join_address(host, port)}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            raise OSError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from error
        self._socket = LoopSocket(socket, self._take)
        self._collecting = asyncio.create_task(self._collect())
        bound_to = str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        return int(bound_to.rpartition(":")[2])

    async def close(self) -> None:
        self._collecting.cancel()
        self.lender.stop()
        self._socket.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        deadline_s = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT_S
        while self.lender.num_lent and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
            self.lender.take_back()
        if self.lender.num_lent:
            log.error("zmq still holds %d blocks; they are not reused", self.lender.num_lent)

    # Requests.

    def _take(self, message: list[zmq.Frame]) -> None:
        peer, *frames = (frame.bytes for frame in message)
        request = frames[0] if len(frames) == 1 else b""
        of_known_only, handle = self._words.get(request[:1], (True, None))
        if handle is None or (of_known_only and peer not in self._known):
            log.debug("a peer sent something that is not for us: %r", request[:16])
            self._send(peer, protocol.refused())
            return
        try:
            handle(peer, request[1:])
        except Exception:  # a bug of ours must not end the service of all others
            log.exception("a request of a receiver failed in an unforeseen way")

    def _hello(self, peer: bytes, greeting: bytes) -> None:
        version, receiver_nonce = protocol.parse_hello(greeting) or (None, b"")
        if version != protocol.VERSION:
            if version is not None:
                log.warning("refused a receiver of protocol version %d; this node's is %d", version, protocol.VERSION)
            self._send(peer, protocol.refused())
            return
        nonce = self._nonce(peer)
        self._send(peer, protocol.CHALLENGE + nonce + self._keys.proof(protocol.SENDER, receiver_nonce, nonce))

    def _answer(self, peer: bytes, answer: bytes) -> None:
        receiver_nonce, proof = answer[: protocol.NONCE_BYTES], answer[protocol.NONCE_BYTES :]
        wanted = self._keys.proof(protocol.RECEIVER, receiver_nonce, self._nonce(peer))
        if not hmac.compare_digest(wanted, proof):
            log.warning("refused a receiver that does not know the cluster's secret")
            self._send(peer, protocol.refused())
            return
        self._known[peer] = None
        if len(self._known) > _NUM_PEERS_REMEMBERED:
            self._known.popitem(last=False)
        self._send(peer, protocol.WELCOME)

    def _fetch(self, peer: bytes, request: bytes) -> None:
        fetch = protocol.parse_fetch(request)
        if fetch is None:
            self._send(peer, protocol.refused())
            return
        self._known.move_to_end(peer)
        self.lender.ask(peer, *fetch)

    def _release(self, peer: bytes, transfer: bytes) -> None:
        self._source.released(TransferId(transfer.decode(errors="replace")))

    def _keep_alive(self, peer: bytes, transfer: bytes) -> None:
        self._source.keep_alive(TransferId(transfer.decode(errors="replace")))

    def _send(self, peer: bytes, *reply: bytes | memoryview) -> bool:
        """Never waits. False: the peer has gone, or does not read what was sent before."""
        try:
            self._socket.send(peer, *reply)
        except zmq.ZMQError as error:
            log.debug("a reply found no taker: %s", error)
            self._known.pop(peer, None)
            return False
        return True

    def _nonce(self, peer: bytes) -> bytes:
        """Our nonce for this connection: zmq names each connection anew, and the key is new in each process."""
        return hmac.digest(self._nonce_key, peer, "sha256")

    # Blocks that zmq still reads.

    async def _collect(self) -> None:
        while True:
            await self.lender.has_loans.wait()
            self.lender.take_back()
            self.lender.lend()
            await asyncio.sleep(_POLL_S)
            self._socket.look()  # zmq drops a lost peer's messages only when it is called
