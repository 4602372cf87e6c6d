"""The generations of one answer, begun together."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvasir.router.openai.answer import AnswerRecord, recorded
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.generation import ChoiceDelta, ChoicesReader, generate_choices, merge_choices
from kvasir.router.openai.short_way import ShortWay
from kvasir.router.openai.tape import Tape
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.text_stream import TextRules
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import Backend, Reader, RoutedRequest, Source


@dataclass(frozen=True, slots=True)
class Begun:
    """A valid request on its way: nothing is asked of the backend before the first delta is."""

    envelope: Envelope
    deltas: AsyncGenerator[ChoiceDelta, None]
    tape: Tape | None  # of one prompt alone
    short_way: ShortWay | None  # for one prompt alone: those of several wait for each other


def begin(
    backend: Backend,
    requests: Sequence[RoutedRequest],
    readers: Sequence[AnswerReader | None],
    rules: TextRules,
    tokenizer: TextTokenizer,
    record: AnswerRecord,
    envelope: Envelope,
) -> Begun:
    """One request a prompt; `readers` are those of one prompt's sequences."""
    choices = [
        ChoicesReader(request, number * envelope.num_sequences, tokenizer, rules, readers)
        for number, request in enumerate(requests)
    ]
    ways = [Reader() for _ in requests]
    short_way = tape = None
    source: Source = backend
    if len(requests) == 1:
        source = tape = Tape(backend, record)
        short_way = ShortWay(choices[0], record.add)
        ways[0].take = short_way.take
    generations = [generate_choices(source, *one) for one in zip(requests, choices, ways, strict=True)]
    return Begun(envelope, recorded(merge_choices(generations), record), tape, short_way)
