"""What a world is made of: requests, what befalls each of them, and what each says when it is alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.engine.blocks import BlockId
from kvasir.engine.limits import Limits
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Sampled
from tests.fakes import VOCAB_SIZE
from tests.unit.engine.sampling_runner import say_alone

STOP_TOKENS = frozenset(range(0, VOCAB_SIZE, 17))
FAILED = "failed"
WARM = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Rule:
    """A grammar: about every third token may come, and what has been said decides which."""

    length: int = 1000  # outputs after which it is complete
    breaks_after: int = 1000  # outputs after which it cannot be followed
    vocabulary: int = VOCAB_SIZE

    def matcher(self) -> "RuleMatcher":
        return RuleMatcher(self)


class RuleMatcher:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._token_ids: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._token_ids) >= self._rule.length

    def follow(self, output_token_ids: Sequence[int]) -> None:
        self._token_ids += output_token_ids[len(self._token_ids) :]

    def take(self, token_id: int) -> None:
        assert self.allowed(())[token_id], "the mask was not kept to"
        self._token_ids.append(token_id)

    def allowed(self, stop_token_ids: Collection[int]) -> NDArray[np.bool_]:
        if self.is_complete or len(self._token_ids) >= self._rule.breaks_after:
            raise InvalidRequest("nothing can follow")
        allowed: NDArray[np.bool_] = (np.arange(self._rule.vocabulary) + sum(self._token_ids)) % 3 == 0
        return allowed


@dataclass(frozen=True)
class Script:
    """One request, and what befalls it. Times are ticks; None: never."""

    prompt: tuple[int, ...]
    max_tokens: int = 6
    arrival: int = 0
    priority: int = 0
    seed: int = 0
    stops: bool = False
    wants: SamplingParams = WARM  # but for the seed, the length and stop tokens
    rule: Rule | None = None
    rule_delay: int = 0  # until it is compiled
    breaks_after: int | None = None  # outputs after which its logits are NaN
    salt: str = ""
    num_moved_tokens: int = 0  # output tokens that it has already when it comes
    hand_off: bool = False
    reports_filled: bool = False
    loads: bool = False  # awaits blocks
    lost_blocks: frozenset[int] = frozenset()  # indices that never land, or land as garbage
    inexact_blocks: frozenset[int] = frozenset()  # indices that land a little different, and are said to
    blocks_per_tick: int = 1
    load_delay: int = 0
    continue_at: int | None = None  # awaits the first token until so many ticks after arrival
    num_first_tokens: int = 1  # that come with it
    cancel_after: int | None = None
    release_delay: int = 0  # of reported blocks
    forks: tuple[int | None, ...] = ()  # when each further sequence of the prompt is cancelled
    is_stored: bool = False  # what it loads comes from a store, and can be fetched again

    @property
    def last_act(self) -> int:
        """Ticks after its arrival until nothing more befalls it, but for transfers."""
        return max(0, self.continue_at or 0, self.cancel_after or 0, self.rule_delay)

    def request(self, name: str) -> Request:
        awaits = {"blocks"} if self.loads else set()
        if self.continue_at is not None:
            awaits.add("continue")
        request = self._plain_request(name)
        request.output_token_ids += self.tokens[: self.num_moved_tokens]
        request.priority, request.arrival_s, request.awaits = self.priority, float(self.arrival), awaits
        request.hand_off, request.reports_filled = self.hand_off, self.reports_filled
        return request

    @cached_property
    def said(self) -> list[Sampled]:
        """Alone, from its first output on, whatever its length; the last one may say why nothing follows."""
        alone = self._plain_request("alone")
        alone.matcher = self.rule.matcher() if self.rule is not None else None
        said: list[Sampled] = []
        for one in islice(say_alone(alone, self.breaks_after), self.max_tokens + 2):
            said.append(one)
            if not one.token_ids:
                break
        return said

    @cached_property
    def tokens(self) -> list[int]:
        return [token for one in self.said for token in one.token_ids]

    def _plain_request(self, name: str) -> Request:
        return Request(
            request_id=RequestId(name),
            prompt_token_ids=list(self.prompt),
            sampling=replace(
                self.wants,
                max_tokens=self.max_tokens,
                seed=self.seed,
                stop_token_ids=STOP_TOKENS if self.stops else frozenset(),
                grammar=None if self.rule is None else Grammar("regex", "."),
            ),
            cache_salt=self.salt,
        )


@dataclass
class Life:
    """What has become of one script so far."""

    script: Script
    request: Request
    tokens: list[int] = field(default_factory=list)
    end: FinishReason | str | None = None
    num_reported: int = 0
    num_scored: int = 0
    to_load: list[int] = field(default_factory=list)
    block_table: tuple[BlockId, ...] = ()
    load_at: int | None = None
    is_loading: bool = False
    cancelled: bool = False
    leader: "Life | None" = None
    has_inexact: bool = False

    @property
    def is_inexact(self) -> bool:
        """What it generates is its own; that nobody else's changes is what is checked."""
        return self.has_inexact or (self.leader is not None and self.leader.is_inexact)

    @property
    def known(self) -> list[int]:
        """The tokens that it came with."""
        return self.request.token_ids[: self.request.num_tokens_at_arrival]

    @property
    def first_tokens(self) -> list[int]:
        """Those that the sender gives it, behind what it came with."""
        if self.script.continue_at is None:
            return []
        return self.script.tokens[self.script.num_moved_tokens :][: self.script.num_first_tokens]

    def next_tokens(self, most: int) -> list[int]:
        return self.script.tokens[len(self.request.output_token_ids) :][:most]

    def expected(self, limits: Limits) -> tuple[list[int], FinishReason | str]:
        """What it generates here (and the first tokens that it was given), by the rules alone."""
        script, given = self.script, len(self.first_tokens)
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size + 1)
        room = script.max_tokens - script.num_moved_tokens
        if not script.hand_off:  # else it grows elsewhere
            room = max(given, min(room, longest - len(self.known)))
        said, tokens = script.said[script.num_moved_tokens :], script.tokens[script.num_moved_tokens :]
        for i in range(given, room):
            if i >= len(tokens):
                return tokens, FAILED
            if said[i].completes_grammar or (script.stops and tokens[i] in STOP_TOKENS):
                return tokens[: i + 1], FinishReason.STOP
            if script.hand_off and i + 1 < room:
                return tokens[: i + 1], FinishReason.HANDED_OFF
        return tokens[:room], FinishReason.LENGTH
