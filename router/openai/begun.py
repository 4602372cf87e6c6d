"""The generations of one answer, begun together."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from kvasir.router.openai.answer import AnswerRecord
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.generation import ChoiceDelta, ChoicesReader, generate_choices
from kvasir.router.openai.short_way import ShortWay
from kvasir.router.openai.tape import Tape
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.text_stream import TextRules
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import Reader, RoutedRequest


@dataclass(frozen=True, slots=True)
class Begun:
    """A valid request on its way: nothing is asked of the backend before the first delta is."""

    envelope: Envelope
    deltas: AsyncGenerator[ChoiceDelta, None]
    tape: Tape
    short_way: ShortWay | None  # for one prompt alone: those of several wait for each other


def begin(
    backend: TenantBackend,
    requests: Sequence[RoutedRequest],
    readers: Sequence[AnswerReader | None],
    rules: TextRules,
    tokenizer: TextTokenizer,
    record: AnswerRecord,
    envelope: Envelope,
) -> Begun:
    """One request a prompt; `readers` are those of all sequences of all prompts."""
    choices = ChoicesReader(requests, tokenizer, rules, readers)
    ways = [Reader() for _ in requests]
    tape = Tape(backend, record)
    short_way = None
    if len(requests) == 1:
        short_way = ShortWay(choices, record)
        ways[0].take = short_way.take
    generation = generate_choices(partial(tape.generate, requests, ways), choices, ways)
    return Begun(envelope, record.recorded(generation), tape, short_way)
