"""A request: one sequence being generated on this node.

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

from kvasir.common.hashing import BlockHash
from kvasir.engine.blocks import BlockId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.swap_space import Saved

RequestId = NewType("RequestId", str)  # one sequence of one client request on this node


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
    draft_token_ids: list[int] = field(default_factory=list)  # proposed for this step, none of them accepted yet
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
    landed_end: int = 0  # tokens up to which landed blocks are filled: the last of them may be partial
    saved: Saved | None = None  # on the host, since it was preempted
    num_stored_tokens: int = 0  # from the front: in a store, whence they can be fetched again; told by the node
    inexact_from: int | None = None  # blocks from this index on hold what this node would not have computed itself
    num_cached_tokens: int = 0  # found in this node's prefix cache at first admission
    num_output_at_arrival: int = 0  # output tokens that came with the request, when it has moved here
    num_awaited_tokens: int = 0  # tokens whose blocks were asked for from elsewhere; 0 again after a preemption
    num_reported_blocks: int = 0
    num_preemptions: int = 0
    order: tuple[float, int] = (0, 0)  # place in the queue, given by the scheduler: smaller is served earlier
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
