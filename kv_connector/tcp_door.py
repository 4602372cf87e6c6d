"""Lets in who knows the password; all others are dropped by ZeroMQ within its handshake, before any message of theirs.

ZeroMQ asks by its authentication protocol (https://rfc.zeromq.org/spec/27): over a socket of a fixed name within the
context, a question for each connection.
"""

import hmac
import logging
from typing import Any

import zmq

from kvasir.kv_connector.tcp_socket import LoopSocket

log = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Doorkeeper:
    def __init__(self, context: "zmq.Context[zmq.Socket[Any]]", user: bytes, password: bytes) -> None:
        self._user = user
        self._password = password
        socket = context.socket(zmq.REP)
        socket.bind(_ADDRESS)
        self._socket = LoopSocket(socket, self._answer)

    def close(self) -> None:
        self._socket.close()

    def _answer(self, question: list[zmq.Frame]) -> None:
        match [frame.bytes for frame in question]:
            case [version, request, _domain, address, _identity, b"PLAIN", user, password] if version == _VERSION:
                is_right = hmac.compare_digest(user, self._user) and hmac.compare_digest(password, self._password)
                code, text = (b"200", b"welcome") if is_right else (b"400", b"wrong password")
                if not is_right:
                    log.warning("refused %s: it does not know the cluster's secret", address.decode(errors="replace"))
                self._socket.send([_VERSION, request, code, text, user, b""])
            case _:
                log.error("ZeroMQ asked in a way that is not understood")
