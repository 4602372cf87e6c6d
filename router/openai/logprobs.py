"""Logprobs in OpenAI's two shapes. A token that is no text by itself (part of a character) is shown by its bytes."""

from collections.abc import Sequence
from typing import Any

from kvasir.router.text.detokenizer import Detokenizer
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


def prompt_logprobs(
    positions: Sequence[PositionLogprobs], top: int, tokenizer: TextTokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token, the token and the best ones by their ids; nothing for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = _token_text(tokenizer.bytes_of(token_id), "")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    scored: list[dict[str, Any] | None] = [None]
    for position in positions:
        own, *best = position.entries
        entries = {str(own[0]): entry(*own, position.rank)}
        for rank, (token_id, logprob) in enumerate(best[:top], start=1):
            entries.setdefault(str(token_id), entry(token_id, logprob, rank))
        scored.append(entries)
    return scored


class CompletionLogprobs:
    """Keeps count of where in the choice's text each token begins, in characters."""

    def __init__(self, tokenizer: TextTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._characters = Detokenizer(tokenizer)
        self._text_offset = 0

    def take_prompt(self, first_token: int, positions: Sequence[PositionLogprobs]) -> dict[str, list[Any]]:
        """Of an echoed prompt. Nothing stands before its first token, so that has no logprob."""
        first: dict[str, list[Any]] = {
            "tokens": [self._text(first_token)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(first_token)],
        }
        rest = self.take(positions)
        return {key: [*values, *rest[key]] for key, values in first.items()}

    def take(self, positions: Sequence[PositionLogprobs]) -> dict[str, list[Any]]:
        token_ids = [position.entries[0][0] for position in positions]
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(position.entries[0][1]) for position in positions],
            "top_logprobs": [self._best(position) for position in positions],
            "text_offset": [self._next_offset(token_id) for token_id in token_ids],
        }

    def _next_offset(self, token_id: int) -> int:
        """Where this token begins. A character that several tokens make comes with the last of them."""
        offset = self._text_offset
        self._text_offset += len(self._characters.push(token_id))
        return offset

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
