"""Checks the password of each new connection. ZeroMQ drops the others in its handshake, before reading any message.

ZeroMQ asks by its authentication protocol (ZAP, https://rfc.zeromq.org/spec/27): one request per connection, over a
socket of a fixed name within the context.
"""

import hmac
import logging
from typing import Any

import zmq

from kvasir.kv_connector.tcp.loop_socket import LoopSocket

log = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Doorkeeper:
    def __init__(self, context: "zmq.Context[zmq.Socket[Any]]", user: bytes, password: bytes) -> None:
        self._credentials = user + b"\0" + password
        socket = context.socket(zmq.REP)
        socket.bind(_ADDRESS)
        self._socket = LoopSocket(socket, self._answer)

    def close(self) -> None:
        self._socket.close()

    def _answer(self, question: list[zmq.Frame]) -> None:
        """version, request, domain, address, identity, mechanism, credentials ..."""
        _, request, _, address, _, mechanism, *credentials = (frame.bytes for frame in question)
        is_right = mechanism == b"PLAIN" and hmac.compare_digest(b"\0".join(credentials), self._credentials)
        if not is_right:
            log.warning("refused %s: it does not know the cluster's secret", address.decode(errors="replace"))
        code, text = (b"200", b"welcome") if is_right else (b"400", b"wrong password")
        self._socket.send(_VERSION, request, code, text, b"", b"")
