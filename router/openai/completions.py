"""POST /v1/completions: the shape of its choices."""

from collections.abc import Sequence
from typing import Any

from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import CompletionLogprobs
from kvasir.router.openai.models import CompletionBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.text.tokenizer import TextTokenizer


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, prompts: Sequence[Prompt], tokenizer: TextTokenizer) -> None:
        self.extra: dict[str, Any] = {}
        self._prompts = [prompt for prompt in prompts for _ in range(body.n or 1)]
        self._echo = body.echo or False
        self._return_token_ids = body.return_token_ids or False
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(tokenizer, body.logprobs) for _ in self._prompts]

    def opening(self, index: int) -> dict[str, Any] | None:
        choice = _choice(index, self._prompts[index].text if self._echo else "")
        if self._return_token_ids:
            choice["prompt_token_ids"] = self._prompts[index].token_ids
        return choice if self._echo or self._return_token_ids else None

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        choice = _choice(delta.index, delta.text)
        if self._logprobs is not None and delta.token_ids:
            choice["logprobs"] = self._logprobs[delta.index].take(delta.logprobs)
        if self._return_token_ids and delta.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice if delta.text or choice["logprobs"] or "token_ids" in choice else None

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, "", finish_reason)

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        text = (self._prompts[index].text if self._echo else "") + "".join(delta.text for delta in deltas)
        choice = _choice(index, text, deltas[-1].finish_reason)
        if self._logprobs is not None:
            positions = [position for delta in deltas for position in delta.logprobs]
            choice["logprobs"] = self._logprobs[index].take(positions)
        if self._return_token_ids:
            choice["prompt_token_ids"] = self._prompts[index].token_ids
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
