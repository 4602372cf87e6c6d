"""200 schemas of growing difficulty: whatever the model prefers, the answer is valid."""

import json
from collections.abc import Sequence
from pathlib import Path

from jsonschema import Draft202012Validator, ValidationError

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.request import FinishReason
from kvasir.engine.scheduler import Scheduler
from kvasir.router.grammar.sources import json_schema_grammar
from tests.schemas import Schema, check_answer, schemas
from tests.tokenizers import save_byte_level
from tests.unit.engine.grammar_world import LogitsRunner, Vocabulary, run

MAX_TOKENS = 1500


class ShortSightedRunner(LogitsRunner):
    """Its logits depend on the last tokens alone: reading back all KV would take the time of everything else."""

    def _compute(self, block_table: list[BlockId], token_ids: Sequence[int], start: int) -> list[int]:
        return [hash((len(token_ids), *token_ids[:3], *token_ids[-5:]))]


def test_every_answer_is_valid_by_construction(tmp_path: Path) -> None:
    vocabulary = Vocabulary(save_byte_level(tmp_path))
    grammars = vocabulary.grammars()
    limits = Limits(block_size=16, num_blocks=8000, max_num_batched_tokens=4000, max_num_seqs=200, max_model_len=2000)
    engine = Engine(Scheduler(limits), ShortSightedRunner(vocabulary, 8000, 16))
    every = schemas()
    requests = [
        vocabulary.request(f"r{index:03}", json_schema_grammar(schema), seed=index, max_tokens=MAX_TOKENS)
        for index, schema in enumerate(every)
    ]
    ends = run(engine, grammars, *requests)
    texts: list[str] = []
    for schema, request in zip(every, requests, strict=True):
        tokens, reason = ends[request.request_id]
        assert reason is FinishReason.STOP, (schema, reason)
        texts.append(vocabulary.decode([token_id for token_id in tokens if token_id != vocabulary.eos]))
        check_answer(schema, texts[-1])
    others = sum(is_valid(schema, text) for schema, text in zip(every, texts[1:], strict=False))
    assert others < 50, "the check lets pass what was meant for other schemas"


def is_valid(schema: Schema, text: str) -> bool:
    try:
        check_answer(schema, text)
    except (ValidationError, ValueError):
        return False
    return True


def test_the_schemas_are_schemas_and_not_twice_the_same() -> None:
    every = schemas()
    assert every == schemas()
    assert len(every) == 200
    assert len({json.dumps(schema) for schema in every}) > 195
    for schema in every[::5]:
        Draft202012Validator.check_schema(schema)
