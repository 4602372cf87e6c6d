"""What the two ends of the tcp connector say to each other, and how each knows that the other knows the secret.

    receiver (DEALER)                       sender (ROUTER)
    HELLO nonce                        -->
                                       <--  CHALLENGE nonce, proof        the sender proves itself first
    ANSWER nonce, proof                -->
                                       <--  WELCOME
    FETCH request, transfer, key       -->
                                       <--  BLOCK request, header, payload    or ABSENT request
    RELEASE transfer | KEEP_ALIVE transfer -->

Every word is one message of a few frames; the secret itself never travels. What is refused is answered by REFUSED.
The proofs keep strangers out; they do not hide or sign what follows, so an untrusted network wants a tunnel.
"""

import hmac
from typing import Any

import zmq

HELLO = b"H"
CHALLENGE = b"C"
ANSWER = b"A"
WELCOME = b"W"
REFUSED = b"X"
FETCH = b"F"
BLOCK = b"B"
ABSENT = b"N"
RELEASE = b"R"
KEEP_ALIVE = b"K"

NONCE_BYTES = 32
MAX_REQUEST_BYTES = 1024  # of one frame on its way to a sender
MAX_REQUESTS_PER_PEER = 64  # a sender lends no more blocks than this to one connection

_HEARTBEAT_MS = 500
_HEARTBEAT_TIMEOUT_MS = 2000
_STALL_TIMEOUT_MS = 3000

SENDER = b"kvasir-kv-sender"
RECEIVER = b"kvasir-kv-receiver"


def proof(secret: str, role: bytes, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + receiver_nonce + sender_nonce, "sha256")


def configure(socket: "zmq.Socket[Any]", max_frame_bytes: int, is_ipv6: bool) -> None:
    """What both ends need: a frozen peer is noticed, no frame is larger than agreed, closing never waits."""
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    # No ping leaves, and so none is missed, while a sender is stuck in the middle of a block that nobody reads: there
    # the kernel has to end the connection (TCP_USER_TIMEOUT), or zmq would hold on to the blocks for ever.
    socket.set(zmq.TCP_MAXRT, _STALL_TIMEOUT_MS)
    socket.set(zmq.HANDSHAKE_IVL, _HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int(is_ipv6))
