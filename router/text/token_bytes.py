"""What bytes each token id stands for.

A vocabulary for generation is a table of byte strings: the text of a sequence is the concatenation, read as UTF-8. With
the table, a token costs one look-up and no decision ever has to be taken back, which cannot be had by asking the
tokenizers library again and again for the text of a growing window: there, a run of invalid bytes either stalls the
stream or changes what was already sent.

The table is made from the library's own decoder settings and compared with the library's answer at start. A decoder
that is not a table of bytes is refused by name.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "Hello, wörld!  I'm here:\n\t日本語 𝄞 👩‍👩‍👧 e\u0301 <0xE2> 1234 ▁ \r\n"

ToBytes = Callable[[str], bytes]


class UnsupportedTokenizer(Exception):
    """This model's tokenizer cannot be served; the message names what is unknown."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Indexed by token id. An id that the vocabulary leaves out has no bytes."""
    to_bytes = _to_bytes(json.loads(tokenizer.to_str())["decoder"])
    table: list[bytes] = [b""] * _num_ids(tokenizer)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        table[token_id] = to_bytes(token)
    _compare_with_library(tokenizer, table)
    return table


def _num_ids(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _to_bytes(decoder: dict[str, Any] | None) -> ToBytes:
    if decoder is None:
        raise UnsupportedTokenizer("tokenizer.json names no decoder")
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    unknown = set(kinds) - {"ByteLevel", "Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"}
    if unknown:
        raise UnsupportedTokenizer(f"tokenizer.json names an unknown decoder: {', '.join(sorted(unknown))}")
    if "ByteLevel" in kinds:
        return _byte_level
    replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    has_byte_tokens = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    # Strip (and Metaspace) drop a space at the very start of a text. Ours is the text after a prompt: nothing to drop.
    return to_bytes


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    pattern = step["pattern"]
    if "String" not in pattern:
        raise UnsupportedTokenizer(f"tokenizer.json names a decoder with an unknown pattern: {pattern}")
    return pattern["String"], step["content"]


def _byte_level(token: str) -> bytes:
    """'Ġhi' -> b' hi'. A token with a character outside of the byte alphabet is plain text."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _compare_with_library(tokenizer: Tokenizer, table: list[bytes]) -> None:
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    ours = b"".join(table[token_id] for token_id in ids).decode(errors="replace")
    theirs = tokenizer.decode(ids, skip_special_tokens=False)
    if ours.lstrip(" ") != theirs.lstrip(" "):
        raise UnsupportedTokenizer(f"the decoder of tokenizer.json is not a table of bytes: {ours!r} != {theirs!r}")
