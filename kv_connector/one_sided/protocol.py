"""What the two ends of a one-sided connector say to each other, beside the engine that moves the payloads.

    receiver                                sender
    HELLO nonce, version               -->                                    or, for another version: REFUSED version
                                       <--  CHALLENGE nonce, proof            the sender proves itself first
    ANSWER proof                       -->
                                       <--  WELCOME engine, pool, loan
    FETCH request, transfer, key ...   -->
                                       <--  LENT request, index, header, block     one of these for each key:
                                            INLINE request, index, header, payload      it is not in the pool
                                            ABSENT request, index
    DONE request                       -->                                    what was lent has been read
    RELEASE transfer | KEEP_ALIVE transfer -->

A message is its length, then its fields, each behind its own length; a length is 4 bytes, little-endian. The secret
itself never travels. The proofs keep strangers out, but they neither encrypt nor sign what follows, and they do not
protect the engine's own traffic.
"""

import asyncio
import hmac
import logging
import os
import struct

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import MAX_HEADER_BYTES
from kvasir.kv_connector.errors import OtherVersion

log = logging.getLogger(__name__)

VERSION = 2  # of this protocol; the HELLO of version 1 named none

HELLO = b"H"
CHALLENGE = b"C"
ANSWER = b"A"
WELCOME = b"W"
REFUSED = b"X"
FETCH = b"F"
LENT = b"L"
INLINE = b"I"
ABSENT = b"N"
DONE = b"D"
RELEASE = b"R"
KEEP_ALIVE = b"K"

NONCE_BYTES = 32
MAX_STRANGER_BYTES = 256  # the longest message from a peer that has not proved the secret yet
MAX_KEYS_PER_FETCH = 512
MAX_REQUEST_BYTES = 1 << 16
MAX_ENGINE_BYTES = 1 << 20
HANDSHAKE_TIMEOUT_S = 2.0

_SENDER = b"kvasir-kv-lender"
_RECEIVER = b"kvasir-kv-reader"
_NUMBER = struct.Struct("<I")
_MAX_FIELDS = MAX_KEYS_PER_FETCH + 8

POOL = struct.Struct("<QQQ")  # address, bytes of a block, blocks
LOAN_S = struct.Struct("<d")


class BadMessage(KVTransferError):
    """The other side broke the protocol: the connection has to be closed."""


def max_answer_bytes(max_payload_bytes: int) -> int:
    return max(max_payload_bytes + MAX_HEADER_BYTES, MAX_ENGINE_BYTES) + MAX_STRANGER_BYTES


def number(value: int) -> bytes:
    return _NUMBER.pack(value)


def to_number(field: bytes) -> int:
    if len(field) != _NUMBER.size:
        raise BadMessage(f"a number of {len(field)} bytes")
    return int(_NUMBER.unpack(field)[0])


def write(writer: asyncio.StreamWriter, *fields: bytes | memoryview) -> None:
    """Queue one message; never waits. `fields` have been copied when this returns."""
    parts: list[bytes | memoryview] = [b""]
    for field in fields:
        parts += [number(len(field)), field]
    parts[0] = number(sum(map(len, parts)))
    writer.write(b"".join(parts))


async def read(reader: asyncio.StreamReader, max_bytes: int) -> list[bytes]:
    """The fields of the next message. Its length is checked before memory is allocated for it."""
    try:
        length = to_number(await reader.readexactly(_NUMBER.size))
        if length > max_bytes:
            raise BadMessage(f"a message of {length} bytes, at most {max_bytes} are allowed")
        return _fields(memoryview(await reader.readexactly(length)))
    except (OSError, EOFError) as error:
        raise KVTransferError("the connection has ended") from error


def _fields(message: memoryview) -> list[bytes]:
    fields: list[bytes] = []
    while message:
        length = to_number(bytes(message[: _NUMBER.size]))
        end = _NUMBER.size + length
        if end > len(message) or len(fields) == _MAX_FIELDS:
            raise BadMessage("a message whose fields do not fit it")
        fields.append(bytes(message[_NUMBER.size : end]))
        message = message[end:]
    if not fields:
        raise BadMessage("an empty message")
    return fields


async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    """The sender's half of the handshake, up to the WELCOME. Raises BadMessage for a stranger, or OtherVersion."""
    nonce = os.urandom(NONCE_BYTES)
    match await read(reader, MAX_STRANGER_BYTES):
        case [word, _, *version] if word == HELLO and version[:1] != [number(VERSION)]:
            write(writer, REFUSED, number(VERSION))
            theirs = to_number(version[0]) if version else 1
            log.warning("refused a receiver of protocol version %d; this node's is %d", theirs, VERSION)
            raise OtherVersion(f"version {theirs}")
        case [word, receiver_nonce, _] if word == HELLO and len(receiver_nonce) == NONCE_BYTES:
            write(writer, CHALLENGE, nonce, _proof(secret, _SENDER, receiver_nonce, nonce))
        case _:
            raise BadMessage("no HELLO")
    match await read(reader, MAX_STRANGER_BYTES):
        case [word, proof] if word == ANSWER and hmac.compare_digest(
            proof, _proof(secret, _RECEIVER, receiver_nonce, nonce)
        ):
            return
        case _:
            log.warning("refused a receiver that does not know the cluster's secret")
            raise BadMessage("no proof")


async def come_in(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str
) -> tuple[bytes, tuple[int, int, int], float]:
    """The receiver's half of the handshake.

    Returns the sender's engine description, its pool (address, bytes of a block, blocks), and how long a loan lasts in
    seconds. Raises OtherVersion, or KVTransferError if the sender does not know the secret or refuses us.
    """
    nonce = os.urandom(NONCE_BYTES)
    write(writer, HELLO, nonce, number(VERSION))
    match await read(reader, MAX_STRANGER_BYTES):
        case [word, sender_nonce, proof] if word == CHALLENGE and hmac.compare_digest(
            proof, _proof(secret, _SENDER, nonce, sender_nonce)
        ):
            write(writer, ANSWER, _proof(secret, _RECEIVER, nonce, sender_nonce))
        case [word, version, *_] if word == REFUSED:
            raise OtherVersion(f"it speaks version {to_number(version)} of the protocol, this node {VERSION}")
        case _:
            raise KVTransferError("it does not know the cluster's secret")
    match await read(reader, MAX_ENGINE_BYTES):
        case [word, engine, pool, loan] if word == WELCOME:
            address, block_bytes, num_blocks = POOL.unpack(pool)
            return engine, (address, block_bytes, num_blocks), float(LOAN_S.unpack(loan)[0])
        case _:
            raise KVTransferError("it refused this node")


def _proof(secret: str, role: bytes, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + receiver_nonce + sender_nonce, "sha256")
