"""Logprobs in OpenAI's two shapes. A token that is no text by itself (part of a character) is shown by its bytes."""

from collections.abc import Sequence
from typing import Any

from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import PositionLogprobs

_LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(positions: Sequence[PositionLogprobs], top: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token_id)
        return {"token": _token_text(data, ""), "logprob": _finite(logprob), "bytes": list(data)}

    content = []
    for position in positions:
        own, *best = position.entries
        content.append(entry(*own) | {"top_logprobs": [entry(*alternative) for alternative in best[:top]]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Keeps count of where in the choice's text each token begins."""

    def __init__(self, tokenizer: TextTokenizer, top: int, text_offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._text_offset = text_offset

    def take(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        tokens, offsets = [], []
        for position in positions:
            token = self._text(position.entries[0][0])
            tokens.append(token)
            offsets.append(self._text_offset)
            self._text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(position.entries[0][1]) for position in positions],
            "top_logprobs": [self._best(position) for position in positions],
            "text_offset": offsets,
        }

    def _best(self, position: PositionLogprobs) -> dict[str, float]:
        """The best ones, and the token itself also if it is none of them."""
        own, *best = position.entries
        return {self._text(token_id): _finite(logprob) for token_id, logprob in [*best[: self._top], own]}

    def _text(self, token_id: int) -> str:
        return _token_text(self._tokenizer.bytes_of(token_id), "bytes:")


def _token_text(data: bytes, mark: str) -> str:
    """b'hi' -> 'hi'; b'\\xf0\\x9f' -> the mark and '\\\\xf0\\\\x9f'"""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
