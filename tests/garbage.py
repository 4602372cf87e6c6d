"""Inputs that no port should ever get, and ways to throw them."""

import asyncio
import random
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_LISTENING = "0A"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48)
_SEEDS = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"
    b'{"model": "m", "prompt": [1], "n": 1e309}',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    _HTTP2 + _SETTINGS,
    _HTTP2 + _SETTINGS + b"\0\0\x05\x01\x05\0\0\0\x01\x82\x86\x84\x41\x8a" + b"\0\0\x05\0\x01\0\0\0\x01\0\0\0\0\0",
    _ZMTP,
    _ZMTP + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + b"\x01\x01H\0\x20" + bytes(32),
    struct.pack("<II1sI32s", 41, 1, b"H", 32, bytes(32)),
    bytes(64),
)


def ports_of(pid: int) -> set[int]:
    """Where a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(link.readlink()))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and f"socket:[{words[9]}]" in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def garbage(rng: random.Random) -> bytes:
    """Noise, or something right with something wrong in it."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.choice((1, 4, 9, 64, 300, 5_000)))
    return spoilt(rng.choice(_SEEDS), rng)


def spoilt(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:
                data[at:at] = data[: rng.randint(0, 400)]
            case _:
                data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\r\n\r\n"))
    return bytes(data)


async def throw(port: int, data: bytes, rng: random.Random) -> None:
    """Over a connection of its own; one in ten waits for an answer, and all leave without a goodbye."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock, suppress(OSError, TimeoutError):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(5):
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, data)
        if rng.random() < 0.1:
            async with asyncio.timeout(0.05):
                await loop.sock_recv(sock, 1 << 16)


async def throw_many(ports: Sequence[int], num_inputs: int, rng: random.Random, num_at_once: int = 32) -> None:
    left = iter(range(num_inputs))

    async def thrower() -> None:
        for _ in left:
            await throw(rng.choice(ports), garbage(rng), rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(thrower())


def random_message(kind: Descriptor, rng: random.Random, depth: int = 0) -> Message:
    """Any message of a kind: some of its fields, with values that may be out of all bounds."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if rng.random() < 0.5 or depth > 5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        values = [_value(field, rng, depth) for _ in range(rng.choice((1, 1, 2, 7)))]
        if field.message_type is not None:
            if field.is_repeated:
                getattr(message, field.name).extend(values)
            else:
                getattr(message, field.name).CopyFrom(values[0])
        elif field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])
    return message


def _value(field: FieldDescriptor, rng: random.Random, depth: int) -> object:
    kind = FieldDescriptor
    if field.message_type is not None:
        return random_message(field.message_type, rng, depth + 1)
    if field.type == kind.TYPE_ENUM:
        return rng.choice((0, 1, 2, 77))
    if field.type == kind.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == kind.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 3, 4, 64)))
    if field.type == kind.TYPE_STRING:
        return rng.choice(("", "a", "x/y", "127.0.0.1:1", "\U0001f642" * 9, "(" * 50, "a" * 5_000))
    if field.type in (kind.TYPE_DOUBLE, kind.TYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1.0, 1e30, float("nan"), float("inf")))
    is_signed = field.type in (kind.TYPE_INT32, kind.TYPE_INT64, kind.TYPE_SINT32, kind.TYPE_SINT64)
    bits = 64 if "64" in _NAMES[field.type] else 32
    top = (1 << (bits - 1)) - 1 if is_signed else (1 << bits) - 1
    return rng.choice((0, 1, 5, 1000, top, *((-1, -top) if is_signed else ())))


_NAMES = {getattr(FieldDescriptor, name): name for name in dir(FieldDescriptor) if name.startswith("TYPE_")}
