"""What is around the choices of an answer, and what an endpoint's choices must be able to show."""

from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.router.openai.generation import ChoiceDelta


class Shape(Protocol):
    """How choices of an endpoint look."""

    whole_object: str
    chunk_object: str
    extra: dict[str, Any]  # beside the choices
    says_more_than_text: bool  # of each token

    def openings(self, first: ChoiceDelta) -> list[dict[str, Any]]:
        """First chunks, before any text: of the choice whose delta `first` follows, or of all choices at once."""
        ...

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """None: nothing of the delta is to be shown."""
        ...

    def closing(self, last: ChoiceDelta) -> dict[str, Any]:
        """The choice's last chunk, after all text: a client that stops reading here has lost nothing."""
        ...

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        """`index` is the choice's own, whatever its deltas say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What is around the choices."""

    response_id: str
    created: int
    model: str
    prompt_lengths: tuple[int, ...]  # in tokens
    num_choices: int  # of each prompt, in their order
    num_sequences: int  # of each prompt, of which those are the best
    include_usage: bool = False
    continuous_usage: bool = False

    def around(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": None,
            "system_fingerprint": None,
            "choices": choices,
        }


class Usage:
    __slots__ = ("_num_cached_tokens", "_num_completion_tokens", "_num_prompt_tokens", "_num_reasoning_tokens")

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_cached_tokens = 0

    def add(self, delta: ChoiceDelta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        self._num_reasoning_tokens += delta.num_reasoning_tokens
        self._num_cached_tokens += delta.num_cached_tokens or 0  # said once for each prompt

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }
        if self._num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage
