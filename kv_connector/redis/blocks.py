"""How a block is kept in Redis, and how it is written and read over one link.

    <prefix>:<key>      a string; for a large block a hash with its pieces under "0", "1", ...

Large blocks are cut into pieces because a server needs memory not only for what it holds, but also for what it is
receiving or sending at the moment. A block is there with all of its pieces or not at all: the pieces are collected
under a temporary name that expires by itself, and then renamed. Redis evicts, expires and removes a hash as a whole.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.redis.commands import command, command_around
from kvasir.kv_connector.redis.link import RedisLink, Refusal
from kvasir.kv_connector.stored import before_payload

ALIGNMENT = 64
PIECE_BYTES = 8 << 20
_NUM_SENT_AHEAD = 8  # blocks sent before the first one's answer is read, so that the server always has work
_UNFINISHED_TTL = b"60000"  # ms; then an unfinished block is removed
_WRONG_TYPE = Refusal("WRONGTYPE")


def write(link: RedisLink, blocks: Iterable[tuple[bytes, Frame]], ttl_ms: int) -> None:
    """Write the blocks. Raises KVTransferError at the first that the server refuses, as it would refuse the others."""
    ttl, num_ahead = b"%d" % ttl_ms, 0
    for name, frame in blocks:
        before = before_payload(frame, ALIGNMENT)
        num_bytes = len(before) + frame.payload.nbytes
        most_ahead = _NUM_SENT_AHEAD - 1 if num_bytes <= PIECE_BYTES else 0
        while num_ahead > most_ahead:
            _granted(link.read_number())
            num_ahead -= 1
        if num_bytes <= PIECE_BYTES:
            head, tail = command_around(b"SET", name, value_bytes=num_bytes, after=(b"PX", ttl))
            link.send(head, before, frame.payload, tail)
            num_ahead += 1
        else:
            _write_in_pieces(link, name, before, frame.payload, ttl)
    for _ in range(num_ahead):
        _granted(link.read_number())


def _write_in_pieces(link: RedisLink, name: bytes, before: bytes, payload: memoryview, ttl: bytes) -> None:
    aside = b"%b:%b" % (name, uuid.uuid4().hex.encode())
    try:
        num_pieces = 0
        for piece in _pieces(before, payload):
            head, tail = command_around(b"HSET", aside, b"%d" % num_pieces, value_bytes=sum(map(len, piece)))
            link.send(head, *piece, tail, command(b"PEXPIRE", aside, _UNFINISHED_TTL))
            written, _ = link.read_number(), link.read_number()
            _granted(written)
            num_pieces += 1
        link.send(command(b"HLEN", aside) + command(b"PEXPIRE", aside, ttl))
        num_there, _ = link.read_number(), link.read_number()
        if _granted(num_there) != num_pieces:
            raise KVTransferError("Redis: a block was evicted while it was written")
        link.send(command(b"RENAME", aside, name))
        _granted(link.read_number())
    except KVTransferError:
        if not link.is_closed:
            remove(link, [aside])
        raise


def _pieces(before: bytes, payload: memoryview) -> Iterator[list[bytes | memoryview]]:
    end = PIECE_BYTES - len(before)
    yield [before, payload[:end]]
    for start in range(end, payload.nbytes, PIECE_BYTES):
        yield [payload[start : start + PIECE_BYTES]]


def read(
    link: RedisLink, names: Sequence[bytes], places: Sequence[memoryview], ttl_ms: int
) -> Iterator[tuple[int, int | None]]:
    """Read blocks, each into its place. Yields, in any order, a block's index and how many bytes of its place it fills;
    None if it is not there.

    A place is not written to any more when the next block is asked for. Reading a block renews its time to live.
    """
    ttl = b"%d" % ttl_ms
    link.send(b"".join(command(b"GET", name) + command(b"PEXPIRE", name, ttl) for name in names))
    in_pieces = []
    for index, place in enumerate(places):
        value, _ = link.read_value(place), link.read_number()  # a replica refuses the second
        if value == _WRONG_TYPE:
            in_pieces.append(index)
        else:
            yield index, None if value is None else _granted(value)
    for index in in_pieces:
        yield index, _read_pieces(link, names[index], places[index])


def _read_pieces(link: RedisLink, name: bytes, place: memoryview) -> int | None:
    """As many pieces as there are. A torn block, or another program's hash, will fail the receiver's checks."""
    num_bytes = 0
    for index in range(place.nbytes // PIECE_BYTES + 1):
        link.send(command(b"HLEN", name) + command(b"HGET", name, b"%d" % index))
        num_pieces, piece = link.read_number(), link.read_value(place[num_bytes:])
        if num_pieces == 0:
            return None  # it has gone in between
        if num_pieces == _WRONG_TYPE or not piece or index == num_pieces:
            break
        num_bytes += _granted(piece)
    return num_bytes


def exist(link: RedisLink, names: Sequence[bytes]) -> list[bool]:
    link.send(b"".join(command(b"EXISTS", name) for name in names))
    return [_granted(link.read_number()) == 1 for _ in names]


def remove(link: RedisLink, names: Sequence[bytes]) -> None:
    link.send(command(b"UNLINK", *names))
    _granted(link.read_number())


def _granted(reply: int | Refusal) -> int:
    if isinstance(reply, Refusal):
        raise KVTransferError(f"Redis refuses: {reply.kind}")
    return reply
