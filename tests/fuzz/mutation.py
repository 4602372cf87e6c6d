"""Bytes that are almost right."""

import random
from collections.abc import Callable

_INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"\x00" * 32)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four changes."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_CHANGES)(data, rng)
    return data


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    at, new = rng.randint(0, len(data)), rng.choice(_INTERESTING)
    return data[:at] + new + data[at + len(new) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 40)) + data[at:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    start, stop = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:start] + data[stop:]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    return data + data[: rng.randint(0, 100)]


_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _overwrite, _insert, _cut, _truncate, _repeat)
