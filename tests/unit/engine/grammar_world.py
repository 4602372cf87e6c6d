"""A model with real logits and no weights: they are a function of all KV so far, read back through the block table."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from kvasir.common.grammar import Grammar
from kvasir.engine.engine import Engine
from kvasir.engine.grammar import GrammarMatcher, Grammars
from kvasir.engine.limits import Limits
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import StepResult
from tests.unit.engine.sampling_runner import SamplingRunner, fake_logits

PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 3},
                "kind": {"enum": ["cat", "dog", "日本"]},
            },
            "required": ["name", "ages", "kind"],
            "additionalProperties": False,
        }
    ),
)


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


class Vocabulary:
    """Of a tokenizer.json with the token </s>, which ends a text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tokenizer = Tokenizer.from_file(str(path))
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos: int = self._tokenizer.token_to_id("</s>")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids)
        return text

    def grammars(self) -> Grammars:
        return Grammars(self.path, self.size, {self.eos})

    def request(self, name: str, grammar: Grammar | None, outputs: list[int] | None = None, **params: Any) -> Request:
        """With a prompt of its own; it brings no matcher."""
        settings = {"temperature": 1.0, "max_tokens": 400, "stop_token_ids": frozenset({self.eos}), **params}
        return Request(
            request_id=RequestId(name),
            prompt_token_ids=[1 + sum(name.encode()) % 200, *name.encode()],
            output_token_ids=outputs or [],
            sampling=SamplingParams(**settings, grammar=grammar),
        )


class LogitsRunner(SamplingRunner):
    """Likes what ends things, so that outputs do, and dislikes white space."""

    def __init__(self, vocabulary: Vocabulary, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._size = vocabulary.size
        self._likes = [vocabulary.encode(text)[0] for text in "]}@"]
        self._likes_most = [vocabulary.encode('"')[0], vocabulary.eos]
        self._dislikes = [vocabulary.encode(text)[0] for text in " \t\r\n"]

    def logits(self, digest: int, request: Request, num_drafts: int) -> Tensor:
        logits = fake_logits(digest, self._size) / 3
        logits[self._likes] += 6
        logits[self._likes_most] += 9
        logits[self._dislikes] -= 4
        return logits


def new_engine(vocabulary: Vocabulary, *, num_blocks: int = 400, **limits: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 64, "max_model_len": 1000, **limits}
    scheduler = Scheduler(Limits(block_size=4, num_blocks=num_blocks, **settings), b"fake-model")
    return Engine(scheduler, LogitsRunner(vocabulary, num_blocks, 4))


def run(engine: Engine, grammars: Grammars, *requests: Request) -> dict[str, tuple[list[int], FinishReason | str]]:
    """All of them to their ends: outputs, and a finish reason or an error's message."""
    ends: dict[str, FinishReason | str] = {}
    for request in requests:
        engine.submit(request)
        if request.sampling.grammar is not None:
            engine.grammar_ready(request.request_id, grammars.compiled(request.sampling.grammar))
    while engine.has_work:
        note(engine.step(), ends)
    engine.check_invariants()
    return {request.request_id: (request.output_token_ids, ends[request.request_id]) for request in requests}


def note(result: StepResult, ends: dict[str, FinishReason | str]) -> None:
    ends |= {output.request_id: output.finish_reason for output in result.outputs if output.finish_reason}
    ends |= {failed.request_id: str(failed.error) for failed in result.failed}


def text_of_random_tokens(matcher: GrammarMatcher, rng: random.Random, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(rng.choice(matcher.allowed(()).nonzero()[0].tolist()))
        matcher.take(tokens[-1])
    return tokens
