"""The engine's nouns: a request, what one step computes, what it gave.

A request's life, and what each phase owns:

    WAITING --> LOADING --> RUNNING --> FINISHED        LOADING only where blocks or a first token come from elsewhere
       ^                       |  ^
       +------ preempted ------+  +------ FOLLOWING     FOLLOWING only where several sequences share one prompt

The one count that everything follows is `num_computed_tokens`: tokens whose K and V are in this node's cache, from
the front, without a hole. Where a block came from (prefix cache, another node, a forward pass here) makes no
difference to anything after it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.common.grammar import Grammar
from kvasir.common.hashing import BlockHash

RequestId = NewType("RequestId", str)  # one sequence of one client request on this node
BlockId = NewType("BlockId", int)  # index into ONE node's KV cache; meaningless on any other node


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick the next token. The defaults switch everything off: greedy is temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16  # 0: nothing is generated, the prompt is computed (and scored) only
    stop_token_ids: frozenset[int] = frozenset()  # the end-of-sequence ids included
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # not None: each prompt token but the first is scored
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a finite number > 0, got {self.repetition_penalty}")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Matcher(Protocol):
    """One sequence's place in its grammar. Its methods raise InvalidRequest where it cannot go on, from then on."""

    @property
    def is_complete(self) -> bool:
        """The grammar is satisfied, and allows nothing more."""
        ...

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Read what is new of the output so far."""
        ...

    def take(self, token_id: int) -> None:
        """One more, which is not among the output yet."""
        ...

    def allowed(self, stop_token_ids: Collection[int]) -> NDArray[np.bool_]:
        """[V]: which tokens may come next; at least one.

        An end-of-sequence token is among them where the grammar is satisfied; one that would not stop the request
        (`ignore_eos`) only where nothing else is left.
        """
        ...


class Phase(Enum):
    WAITING = "waiting"  # queued; owns no blocks
    LOADING = "loading"  # owns blocks and a seat; others may be writing into the blocks
    RUNNING = "running"  # owns blocks and a seat; computed step by step
    FOLLOWING = "following"  # waits for the prompt of another sequence; owns nothing
    FINISHED = "finished"  # owns nothing


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token, one of stop_token_ids, or nothing more that the grammar allows
    LENGTH = "length"  # max_tokens, or the model's length
    HANDED_OFF = "handed_off"  # prompt computed and first token sampled; a decode node goes on


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence being generated on this node.

    Three fields say what is special about it here:
    `hand_off`   (prefill node) it ends with its first token, and its blocks are reported as they are computed, each
                 with a reference that the receiver of the report must release.
    `reports_filled`  (decode node) its blocks, those with output tokens too, are reported like that when they are full;
                 not the ones that were in the prefix cache.
    `awaits`     (decode node) after admission it stays LOADING until all of these have been called:
                 "blocks" -> `loading_done`, "continue" -> `continue_with`, "grammar" -> `grammar_ready`.

    Several sequences of one prompt: one of them leads, and the others are its `forks`. They wait until the leader has
    computed the prompt, then go on by themselves, on the same full blocks and on a copy of the partial last one. First
    tokens that are sampled here come from the same logits for all of them. A leader that ends before the prompt is
    computed stays for the sake of its forks, silently.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0  # lower is served earlier
    arrival_s: float = 0.0  # monotonic clock
    hand_off: bool = False
    reports_filled: bool = False
    awaits: set[str] = field(default_factory=set)

    matcher: Matcher | None = None  # of `sampling.grammar`; its own, and never another request's

    phase: Phase = Phase.WAITING
    block_table: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of full blocks, as far as they were needed
    num_computed_tokens: int = 0
    loaded_blocks: set[int] = field(default_factory=set)  # landed ahead: indices past the computed tokens
    inexact_from: int | None = None  # blocks from this index on hold what this node would not have computed itself
    num_cached_tokens: int = 0  # found in this node's prefix cache at first admission
    num_output_at_arrival: int = 0  # output tokens that came with the request, when it has moved here
    num_awaited_tokens: int = 0  # tokens whose blocks were asked for from elsewhere; 0 again after a preemption
    num_reported_blocks: int = 0
    num_preemptions: int = 0
    order: tuple[int, int] = (0, 0)  # place in the queue, given by the scheduler: smaller is served earlier
    num_scored_tokens: int = 0  # of the prompt: the logprobs of those behind so many tokens have been given
    forks: list["Request"] = field(default_factory=list)  # FOLLOWING this one
    leader: "Request | None" = None  # whom it is FOLLOWING
    cancelled: bool = False  # ends when the transfer has stopped touching its blocks, and its forks have theirs

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_at_arrival(self) -> int:
        return len(self.prompt_token_ids) + self.num_output_at_arrival

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_scoring(self) -> bool:
        """Logprobs of its prompt are still wanted, so that all of the prompt must be computed here."""
        return self.sampling.prompt_logprobs is not None and self.num_scored_tokens < len(self.prompt_token_ids) - 1

    def num_exact(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks others may take for what their hash says."""
        return num_blocks if self.inexact_from is None else min(num_blocks, self.inexact_from)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of one request: many in prefill, one in decode.

        tokens      0 ........ start ......... start + num_tokens ....... request.num_tokens
                    |<-computed->|<- this step ->|
    The request's `block_table` already covers all of it.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True if this chunk's last logits give the request's next token."""
        return self.end == self.request.num_tokens

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
    """What the model runner gives for one request: its next token, logprobs of its prompt, or both."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # one for each of the chunk's `scored` positions
    is_finite: bool = True  # False: the logits held NaN or infinity; token_ids mean nothing
    completes_grammar: bool = False  # nothing may follow
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
    """A request got its seat. If it awaits blocks, `missing` are the indices of its `block_table` to be filled."""

    request: Request
    block_table: tuple[BlockId, ...]
    missing: tuple[int, ...]
    num_cached_tokens: int
    queue_s: float


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
    computed: tuple[ComputedBlocks, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    stored: tuple[tuple[BlockHash, BlockHash], ...] = ()  # (hash, parent) that the prefix cache gained
    dropped: tuple[BlockHash, ...] = ()

    @property
    def is_empty(self) -> bool:
        told = (self.outputs, self.admitted, self.computed, self.failed, self.prompt_logprobs)
        return not any((*told, self.stored, self.dropped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler must keep to. Found at start, never changed."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0  # 0: no limit of its own
    watermark: float = 0.01  # share of blocks kept free when a newcomer is admitted
    enable_prefix_caching: bool = True
    reserve_whole_prompt: bool = False  # a prefill node: all of a prompt's blocks or none, and no preemption
    scheduling_policy: str = "fcfs"  # or "priority"

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What the bytes of one block are; both sides of a transfer must agree on it, but for the dtype."""

    num_layers: int
    num_kv_heads: int  # held here
    total_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float32", "bfloat16", "float16"
    first_kv_head: int = 0

    @property
    def bytes_per_block(self) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * itemsize


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """5 tokens, block_size 4 -> 2"""
    return -(-num_tokens // block_size)


def slot_mapping(block_table: Sequence[BlockId], positions: range, block_size: int) -> list[int]:
    """block_table [5, 2], block_size 4, positions 3..5  ->  [23, 8, 9]"""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]
