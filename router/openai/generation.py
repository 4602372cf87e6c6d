"""The choices of one answer as they come: text, tokens and logprobs, whatever shape they are then sent in."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvasir.common.errors import NodeUnavailable
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.parts import Part
from kvasir.router.text.text_stream import TextRules, TextStream
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import PositionLogprobs, Reader, RoutedRequest, TokenDelta


@dataclass(slots=True)  # a value, but freezing would double what making one costs
class ChoiceDelta:
    """What is new of one choice. `token_ids` are all that were generated, whether they have text or not."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str | None
    num_cached_tokens: int | None
    served_by: str = ""  # address of the node that sampled these tokens
    parts: tuple[Part, ...] | None = None  # of the text, where it is read; None: it is all content
    num_reasoning_tokens: int = 0  # more than `token_ids`, where earlier ones turn out to be some
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # of the choice's prompt, from its second token on
    stop_reason: str | int | None = None  # the client's own stop string, or stop token, that has ended it


class ChoicesReader:
    """What the tokens of all prompts' sequences say, each as a choice.

    A stop string, or the only call that an answer may make, ends a sequence before its own end.
    """

    __slots__ = ("_open", "_prompt_logprobs", "_read_before", "num_sequences")

    def __init__(
        self,
        requests: Sequence[RoutedRequest],
        tokenizer: TextTokenizer,
        rules: TextRules,
        readers: Sequence[AnswerReader | None],
    ) -> None:
        """`readers`: one a sequence, of all prompts."""
        self.num_sequences = requests[0].num_sequences  # of each prompt
        stop_token_ids = requests[0].sampling.stop_token_ids
        self._open: list[tuple[TextStream, AnswerReader | None] | None] = [  # None: it has ended
            (TextStream(tokenizer, rules, stop_token_ids), reader) for reader in readers
        ]
        self._prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}  # by prompt
        self._read_before: tuple[TokenDelta, ChoiceDelta] | None = None

    @property
    def any_open(self) -> bool:
        return any(self._open)

    def read(self, delta: TokenDelta) -> ChoiceDelta | None:
        """None: it was on its way when we had enough. A delta that was given back may be read once more."""
        if self._read_before is not None and self._read_before[0] is delta:
            return self._read_before[1]
        at = delta.sequence
        one = self._open[at]
        if one is None:
            return None
        text, reader = one
        choice = _read_text(delta, text, at) if reader is None else _read_parts(delta, text, reader, at)
        if delta.prompt_logprobs:  # they come with the first delta of any of a prompt's
            self._prompt_logprobs[at // self.num_sequences] = delta.prompt_logprobs
        if self._prompt_logprobs:
            choice.prompt_logprobs = self._prompt_logprobs.get(at // self.num_sequences, ())
        if choice.finish_reason is not None:
            self._open[at] = None
            if choice.finish_reason != "length":
                choice.stop_reason = text.stop_reason(choice.token_ids)
        return choice

    def give_back(self, delta: TokenDelta, choice: ChoiceDelta) -> None:
        self._read_before = delta, choice


async def generate_choices(
    begin: Callable[[], AsyncGenerator[TokenDelta, None]], choices: ChoicesReader, readers: Sequence[Reader]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Of all sequences. Each ends with the delta that has a finish reason, unless this raises.

    `begin` is called with the first delta that is asked for; `readers`: one a prompt.
    """
    num_sequences = choices.num_sequences
    final: ChoiceDelta | None = None
    async with aclosing(begin()) as deltas:
        async for delta in deltas:
            choice = choices.read(delta)
            if choice is None:
                continue
            if choices.any_open:
                if choice.finish_reason is not None and delta.finish_reason is None:
                    readers[delta.sequence // num_sequences].stop(delta.sequence % num_sequences)
                yield choice
                continue
            final = choice
            if delta.finish_reason is None:
                break  # else the generation comes to its own end
    if final is None:
        raise NodeUnavailable("the generation broke off")
    yield final


def _read_text(delta: TokenDelta, text: TextStream, index: int) -> ChoiceDelta:
    num_before = text.num_tokens
    shown = text.push(delta.token_ids)
    token_ids, logprobs, finish_reason = delta.token_ids, delta.logprobs, delta.finish_reason
    if text.is_stopped:
        num_taken = text.num_tokens - num_before
        token_ids, logprobs, finish_reason = token_ids[:num_taken], logprobs[:num_taken], "stop"
    elif finish_reason is not None:
        shown += text.flush()
    return ChoiceDelta(index, shown, token_ids, logprobs, finish_reason, delta.num_cached_tokens, delta.served_by)


def _read_parts(delta: TokenDelta, text: TextStream, reader: AnswerReader, index: int) -> ChoiceDelta:
    """Token by token, so that what is counted does not depend on how many come at once."""
    shown = ""
    parts: list[Part] = []
    num_taken, num_thought_before = 0, reader.num_reasoning_tokens
    for token_id in delta.token_ids:
        num_taken += 1
        piece = text.push((token_id,))
        shown += piece
        parts += reader.push_token(piece)
        if text.is_stopped or reader.is_done:
            break
    finish_reason = "stop" if text.is_stopped or reader.is_done else delta.finish_reason
    if finish_reason is not None:
        rest = text.flush()
        shown += rest
        parts += reader.push(rest) + reader.flush(is_cut=finish_reason == "length" or text.is_stopped)
    if finish_reason == "stop":
        finish_reason = reader.finish_reason
    return ChoiceDelta(
        index=index,
        text=shown,
        token_ids=delta.token_ids[:num_taken],
        logprobs=delta.logprobs[:num_taken],
        finish_reason=finish_reason,
        num_cached_tokens=delta.num_cached_tokens,
        served_by=delta.served_by,
        parts=tuple(parts),
        num_reasoning_tokens=reader.num_reasoning_tokens - num_thought_before,
    )
