"""Commands in the Redis protocol (RESP 2): an array of words, each behind its length."""

from collections.abc import Sequence

_END = b"\r\n"


def command(*words: bytes) -> bytes:
    """`command(b"GET", b"a")` is `*2 $3 GET $1 a`, with CRLF after each."""
    return b"*%d\r\n" % len(words) + _bulk(words)


def command_around(*words: bytes, value_bytes: int, after: Sequence[bytes] = ()) -> tuple[bytes, bytes]:
    """The bytes to send before and after a large value, so that the value itself need not be copied into the command.

    words: those before the value, the command's name first. after: those behind it.
    """
    head = b"*%d\r\n" % (len(words) + 1 + len(after)) + _bulk(words) + b"$%d\r\n" % value_bytes
    return head, _END + _bulk(after)


def _bulk(words: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
