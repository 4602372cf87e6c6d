"""Token ids to text, one at a time."""

import codecs
from collections.abc import Sequence

from kvasir.router.text.tokenizer import TextTokenizer


class Detokenizer:
    """The pieces, joined, are the text of all ids at once, byte for byte.

    A character that is not complete yet is kept back. Bytes that cannot become one are U+FFFD, at once; what is
    incomplete when the sequence ends is one U+FFFD.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.bytes_of(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._tokenizer.bytes_of, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
