"""POST /v1/completions: the shape of its choices."""

from collections.abc import Sequence
from typing import Any

from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import CompletionLogprobs, prompt_logprobs
from kvasir.router.openai.models import CompletionBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.text.tokenizer import TextTokenizer


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, prompts: Sequence[Prompt], tokenizer: TextTokenizer) -> None:
        self.extra: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._prompts = [prompt for prompt in prompts for _ in range(body.num_choices)]
        self._echo = body.echo or False
        self._return_token_ids = body.return_token_ids or False
        self._prompt_logprobs = body.prompt_logprobs
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(tokenizer, body.logprobs) for _ in self._prompts]
        self.says_more_than_text = self._logprobs is not None or self._return_token_ids

    def openings(self, first: ChoiceDelta) -> list[dict[str, Any]]:
        return [self._before_text(first.index, first)] if self._echo or self._return_token_ids else []

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        choice = _choice(delta.index, delta.text)
        if self._logprobs is not None and delta.token_ids:
            choice["logprobs"] = self._logprobs[delta.index].take(delta.logprobs)
        if self._return_token_ids and delta.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice if delta.text or choice["logprobs"] or "token_ids" in choice else None

    def closing(self, last: ChoiceDelta) -> dict[str, Any]:
        return _choice(last.index, "", last.finish_reason) | {"stop_reason": last.stop_reason}

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        choice = self._before_text(index, deltas[0])
        choice["text"] += "".join(delta.text for delta in deltas)
        choice |= {"finish_reason": deltas[-1].finish_reason, "stop_reason": deltas[-1].stop_reason}
        if self._logprobs is not None:
            of_prompt = choice["logprobs"] or {}
            generated = self._logprobs[index].take([position for delta in deltas for position in delta.logprobs])
            choice["logprobs"] = {key: [*of_prompt.get(key, ()), *values] for key, values in generated.items()}
        if self._prompt_logprobs is not None:
            scored = deltas[0].prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(scored, self._prompt_logprobs, self._tokenizer)
        if self._return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _before_text(self, index: int, first: ChoiceDelta) -> dict[str, Any]:
        """The prompt, as far as it is wanted, and what is to be said of it."""
        prompt = self._prompts[index]
        choice = _choice(index, prompt.text if self._echo else "")
        if self._echo and self._logprobs is not None:
            choice["logprobs"] = self._logprobs[index].take_prompt(prompt.token_ids[0], first.prompt_logprobs)
        if self._return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return choice


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
