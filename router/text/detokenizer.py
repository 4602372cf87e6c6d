"""Token ids to text, one at a time."""

import codecs
from collections.abc import Sequence

from kvasir.router.text.tokenizer import TextTokenizer


class Detokenizer:
    """The pieces, joined, are the text of all ids at once, byte for byte.

    A character that is not complete yet is kept back. Bytes that cannot become one are U+FFFD, at once; what is
    incomplete when the sequence ends is one U+FFFD.
    """

    __slots__ = ("_bytes_of", "_pending")

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._pending = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode(self._bytes_of(token_ids[0]))
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        if self._pending:
            data = self._pending + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[num_decoded:]
        return text
