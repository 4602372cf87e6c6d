"""One step: what is to be computed, and what it gave."""

from dataclasses import dataclass

from kvasir.common.hashing import BlockHash
from kvasir.engine.blocks import BlockId
from kvasir.engine.request import FinishReason, Request, RequestId


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of one request: many in prefill, one in decode.

        tokens      0 ........ start ......... start + num_tokens ....... request.num_tokens
                    |<-computed->|<- this step ->|
    The request's `block_table` already covers all of it.

    The last `num_drafts` of them are only proposed, the first of the request's `draft_token_ids`: each is kept if it is
    what the logits before it give, and all that follow one that is not are as if they had never been.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True if this chunk's last logits (with drafts: those before them too) give the request's next token."""
        return self.end - self.num_drafts == self.request.num_tokens

    @property
    def samplers(self) -> tuple[Request, ...]:
        """Whose next token its last logits give: the request, and forks whose first token is still to be sampled."""
        if not self.samples:
            return ()
        forks = () if self.request.output_token_ids else self.request.forks
        first = [fork for fork in forks if not (fork.output_token_ids or fork.awaits)]
        return tuple(first) if self.request.cancelled else (self.request, *first)

    @property
    def scored(self) -> range:
        """The positions in it whose logits score the prompt token that follows, where that is wanted."""
        if not self.request.is_scoring:
            return range(0)
        num_scored = max(self.start, self.request.num_scored_tokens)
        return range(num_scored, max(num_scored, min(self.end, len(self.request.prompt_token_ids) - 1)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Of the raw logits. `entries`: the token itself first, then the best ones, each (token id, logprob)."""

    entries: tuple[tuple[int, float], ...]
    rank: int  # of the token itself; 1 is the best


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the model runner gives for one request: its next token, logprobs of its prompt, or both.

    With drafts there may be more tokens: all but the last are drafts that were kept, and their K and V are computed.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # one for each of the chunk's `scored` positions
    is_finite: bool = True  # False: the logits held NaN or infinity; token_ids mean nothing
    completes_grammar: bool = False  # nothing may follow the last token
    error: Exception | None = None  # of this request alone; there is no token


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    request_id: RequestId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens [first_position, first_position + len(positions)); told in order, each once."""

    request_id: RequestId
    first_position: int
    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got its seat. If it awaits blocks, `missing` are the indices of its `block_table` to be filled.

    `is_again`: it had been preempted, and wants blocks once more that a store still has.
    """

    request: Request
    block_table: tuple[BlockId, ...]
    missing: tuple[int, ...]
    num_cached_tokens: int
    queue_s: float
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks [first_index, first_index + len(block_ids)) of a `hand_off` or `reports_filled` request are final.

    Each carries one reference, to be given back by `release_blocks`. `hashes` holds None for the last block where it
    is partial, and for blocks that are not exact; `is_last` says that these are the last of a prompt handed off.
    """

    request_id: RequestId
    first_index: int
    block_ids: tuple[BlockId, ...]
    hashes: tuple[BlockHash | None, ...]
    num_tokens: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: RequestId
    error: Exception


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave, for all requests in it."""

    step: int
    outputs: tuple[SequenceOutput, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    passed_over: tuple[RequestId, ...] = ()  # newcomers that found no room yet
    computed: tuple[ComputedBlocks, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    stored: tuple[BlockHash, ...] = ()  # what the prefix cache gained
    dropped: tuple[BlockHash, ...] = ()  # and lost

    @property
    def is_empty(self) -> bool:
        told = (self.outputs, self.admitted, self.passed_over, self.computed, self.failed, self.prompt_logprobs)
        return not any((*told, self.stored, self.dropped))
