"""What the two ends of the tcp connector say to each other, and how each proves that it knows the secret.

    receiver (DEALER)                               sender (ROUTER)
    HELLO version nonce                        -->
                                               <--  CHALLENGE nonce proof           the sender proves itself first
    ANSWER nonce proof                         -->
                                               <--  WELCOME
    FETCH number transfer keys                 -->
                                               <--  BLOCK number header | payload   for each key, numbered from `number`
                                               <--  TRAY entries | payloads         the same of several small blocks
                                               <--  ABSENT number                   if the block is not there
    RELEASE transfer, or KEEP_ALIVE transfer   -->

A message is one frame that begins with its word. A block's payload is a second frame, so that it need not be copied.
Small blocks are cheaper to copy than to send one by one: they are copied into a tray, which travels as one frame.

A request that is refused is answered by REFUSED and our version. Only equal versions understand each other; HELLO and
REFUSED are the two words that every version can read. Those of version 1 named no version.

Before any of this, ZeroMQ's own handshake keeps out strangers, so that none of their messages takes memory: by CURVE
if encryption is on, else by a password derived from the secret. That password travels in the clear, so it opens
nothing else; the proofs above contain fresh nonces and cannot be replayed. Without encryption, what follows the
handshake is neither hidden nor signed.
"""

import functools
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from kvasir.kv_connector.base import MAX_HEADER_BYTES, BlockKey, Frame, TransferId

VERSION = 2  # of this protocol: to be raised by every change that an older peer would not understand

HELLO = b"H"
CHALLENGE = b"C"
ANSWER = b"A"
WELCOME = b"W"
REFUSED = b"X"
FETCH = b"F"
BLOCK = b"B"
TRAY = b"T"
ABSENT = b"N"
RELEASE = b"R"
KEEP_ALIVE = b"K"

VERSION_BYTES = 2
NONCE_BYTES = 32
NUMBER_BYTES = 8
KEY_BYTES = 32
MAX_REQUEST_BYTES = 2048  # the longest frame that a sender accepts
MAX_KEYS_A_REQUEST = 48
MAX_REQUESTS_PER_PEER = 256  # blocks that one connection may have lent or asked for
SMALL_BYTES = 128 << 10  # if no payload can be larger, blocks travel in trays
TRAY_BYTES = 512 << 10
_ENTRY = struct.Struct(f"<{NUMBER_BYTES}sHI")  # number, length of the header (which follows), length of the payload

_HEARTBEAT_MS = 500
_HEARTBEAT_TIMEOUT_MS = 2000
_STALL_TIMEOUT_MS = 3000
_FRAMING_BYTES = 64  # room for what encryption adds to a frame

SENDER = b"kvasir-kv-sender"
RECEIVER = b"kvasir-kv-receiver"
USER = b"kvasir"


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Everything derived from the cluster's secret. Guessing the secret from any of it costs one scrypt per guess."""

    master: bytes

    @property
    def password(self) -> bytes:
        return hmac.digest(self.master, b"password", "sha256").hex().encode()

    @property
    def curve_secret(self) -> bytes:
        """The secret key of every sender in the cluster, in ZeroMQ's text form (Z85)."""
        text: bytes = z85.encode(hmac.digest(self.master, b"curve", "sha256"))
        return text

    def proof(self, role: bytes, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
        return hmac.digest(self.master, role + receiver_nonce + sender_nonce, "sha256")


@functools.lru_cache(maxsize=4)
def keys_of(secret: str) -> Keys:
    """Derive the keys: about 50 ms, then cached."""
    return Keys(hashlib.scrypt(secret.encode(), salt=b"kvasir kv tcp 1", n=1 << 14, r=8, p=1, dklen=32))


def configure(socket: "zmq.Socket[Any]", max_frame_bytes: int, is_ipv6: bool) -> None:
    """Options of both ends: notice a frozen peer, accept no frame larger than agreed, never wait in `close`."""
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    # While a sender is stuck in the middle of a block that nobody reads, no ping leaves and so none is missed. There
    # the kernel has to end the connection (TCP_USER_TIMEOUT), or zmq would hold the blocks for ever.
    socket.set(zmq.TCP_MAXRT, _STALL_TIMEOUT_MS)
    socket.set(zmq.HANDSHAKE_IVL, _HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes + _FRAMING_BYTES)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int(is_ipv6))


def guard_sender(socket: "zmq.Socket[Any]", keys: Keys, is_encrypted: bool) -> None:
    """Keep out who does not know the secret. Without CURVE, zmq asks our `Doorkeeper` about each password."""
    if is_encrypted:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.curve_secret)
    else:
        socket.set(zmq.PLAIN_SERVER, 1)
        socket.set(zmq.ZAP_DOMAIN, USER)


def guard_receiver(socket: "zmq.Socket[Any]", keys: Keys, is_encrypted: bool) -> None:
    if is_encrypted:
        public, secret = zmq.curve_keypair()
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(keys.curve_secret))
    else:
        socket.set(zmq.PLAIN_USERNAME, USER)
        socket.set(zmq.PLAIN_PASSWORD, keys.password)


def hello(nonce: bytes) -> bytes:
    return HELLO + _version_bytes() + nonce


def parse_hello(greeting: bytes) -> tuple[int, bytes] | None:
    """What follows the word HELLO -> version and nonce; None if it is malformed."""
    if len(greeting) == NONCE_BYTES:
        return 1, greeting
    if len(greeting) < VERSION_BYTES + NONCE_BYTES:
        return None
    return int.from_bytes(greeting[:VERSION_BYTES], "little"), greeting[VERSION_BYTES:][:NONCE_BYTES]


def refused() -> bytes:
    return REFUSED + _version_bytes()


def parse_refused(rest: bytes) -> int:
    """What follows the word REFUSED -> the version of the sender that refuses."""
    return int.from_bytes(rest[:VERSION_BYTES], "little") if rest else 1


def _version_bytes() -> bytes:
    return VERSION.to_bytes(VERSION_BYTES, "little")


def fetch(first_number: int, transfer_id: TransferId, keys: Sequence[BlockKey]) -> bytes:
    """FETCH | number | length of the transfer's name | its name, at most MAX_TRANSFER_ID_BYTES | keys"""
    name = transfer_id.encode()
    return b"".join((FETCH, number(first_number), bytes([len(name)]), name, *keys))


def parse_fetch(request: bytes) -> tuple[int, TransferId, list[BlockKey]] | None:
    """What follows the word FETCH -> first number, transfer, keys; None if it is malformed."""
    start = NUMBER_BYTES + 1
    end = start + request[start - 1] if len(request) >= start else len(request)
    num_keys, rest = divmod(len(request) - end, KEY_BYTES)
    if rest or not 0 < num_keys <= MAX_KEYS_A_REQUEST:
        return None
    keys = [BlockKey(request[at : at + KEY_BYTES]) for at in range(end, len(request), KEY_BYTES)]
    transfer_id = TransferId(request[start:end].decode(errors="replace"))
    return int.from_bytes(request[:NUMBER_BYTES], "little"), transfer_id, keys


def entry(number: bytes, frame: Frame) -> bytes:
    """The entry of one block on a tray: its number, the two lengths, its header."""
    return _ENTRY.pack(number, len(frame.header), frame.payload.nbytes) + frame.header


def parse_tray(entries: bytes, payloads: memoryview) -> list[tuple[int, Frame]] | None:
    """The number and frame of each block on a tray; None if entries and payloads do not fit each other."""
    blocks: list[tuple[int, Frame]] = []
    at = start = 0
    while at + _ENTRY.size <= len(entries):
        number, header_bytes, payload_bytes = _ENTRY.unpack_from(entries, at)
        at += _ENTRY.size + header_bytes
        end = start + payload_bytes
        blocks.append((int.from_bytes(number, "little"), Frame(entries[at - header_bytes : at], payloads[start:end])))
        start = end
    return blocks if at == len(entries) and start == payloads.nbytes else None


def max_reply_bytes(max_payload_bytes: int) -> int:
    """The longest frame that a receiver has to accept."""
    if max_payload_bytes <= SMALL_BYTES:
        return TRAY_BYTES
    return max(max_payload_bytes, len(BLOCK) + NUMBER_BYTES + MAX_HEADER_BYTES)


def number(value: int) -> bytes:
    return (value % (1 << 8 * NUMBER_BYTES)).to_bytes(NUMBER_BYTES, "little")
