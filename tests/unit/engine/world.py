"""All that surrounds an engine, acting from a script: arrivals, transfers, first tokens, cancels, releases.

Each tick the script acts, then the engine steps if it has work; after each step everything that must hold is checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.request import FinishReason, Phase, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.step import Admitted, ComputedBlocks, Sampled, SequenceOutput, StepPlan, StepResult
from kvasir.engine.swap_space import HostBlock, SwapSpace
from tests.fakes import FakeModelRunner, fake_kv, fake_tokens
from tests.unit.engine.drafting import Always, Oracle

STOP_TOKENS = frozenset(range(0, 1000, 17))  # about every 17th token stops


@dataclass(frozen=True)
class Script:
    """One request, and what befalls it. Times are ticks; None: never."""

    prompt: tuple[int, ...]
    max_tokens: int = 6
    arrival: int = 0
    priority: int = 0
    seed: int = 0
    stops: bool = False
    num_moved_tokens: int = 0  # output tokens that it has already when it comes
    hand_off: bool = False
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


@dataclass(frozen=True)
class Surroundings:
    """What there is beside the cache, and what it costs, in the units of a step's time: each step takes one."""

    num_host_blocks: int = 0
    copy_s: float = 0.0  # of one block
    fetch_s: float | None = None  # of one block; None: never measured
    num_drafts: int = 0  # at most, for each request and step


@dataclass
class Life:
    """What has become of one script so far."""

    script: Script
    request: Request
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    num_reported: int = 0
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


class CheckingRunner(FakeModelRunner):
    """Also checks that no plan breaks a limit, and that nobody writes what another may read."""

    scheduler: Scheduler

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        limits, tables = self.scheduler.limits, self.scheduler.tables
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len({chunk.request.request_id for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            assert chunk.request.phase is Phase.RUNNING
            first, last = chunk.start // limits.block_size, (chunk.end - 1) // limits.block_size
            for block in chunk.request.block_table[first : last + 1]:
                assert tables.pool.ref_count(block) == 1, f"block {block} is written while others hold it"
                assert not tables.cache.is_registered(block), f"block {block} is written while it can be found"
        return super().execute(plan)


class Host:
    """Memory for preempted requests."""

    def __init__(self, kv: NDArray[np.int64]) -> None:
        self._kv = kv
        self._saved: dict[HostBlock, NDArray[np.int64]] = {}

    def save(self, block: BlockId, place: HostBlock) -> None:
        self._saved[place] = self._kv[block].copy()

    def load(self, place: HostBlock, block: BlockId) -> None:
        self._kv[block] = self._saved[place]


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by so much each time it is read."""
    times = iter(range(10**9))
    return lambda: step_s * next(times)


class World:
    def __init__(self, limits: Limits, scripts: Sequence[Script], surroundings: Surroundings = Surroundings()) -> None:
        self.limits = limits
        self.runner = CheckingRunner(limits.num_blocks, limits.block_size)
        scheduler = Scheduler(limits, b"fake-model")
        host = Host(self.runner.kv)
        scheduler.tables.swap = SwapSpace(surroundings.num_host_blocks, host, ticking(surroundings.copy_s))
        scheduler.fetch_s_per_block = surroundings.fetch_s
        self.engine = Engine(scheduler, self.runner, clock=ticking(1.0))
        if surroundings.num_drafts:
            oracle = Oracle(lambda request, most: fake_tokens(request.token_ids, most, request.sampling.seed))
            self.engine.speculator = Speculator(oracle, scheduler, surroundings.num_drafts, Always())
        self.runner.scheduler = scheduler
        self.lives: dict[str, Life] = {}
        for i, script in enumerate(scripts):
            self._add(f"r{i}", script)
        self.reports: list[tuple[int, ComputedBlocks, list[int]]] = []  # (when to release, report, its tokens)
        self.tick = 0

    def _add(self, name: str, script: Script) -> None:
        leader = Life(script, _request(name, script))
        for number, cancel_after in enumerate(script.forks, start=1):
            of_fork = replace(script, loads=False, seed=script.seed + number, cancel_after=cancel_after)
            fork = Life(of_fork, _request(f"{name}.{number}", of_fork), leader=leader)
            leader.request.forks.append(fork.request)
            self.lives[f"{name}.{number}"] = fork  # continued before its leader is
        self.lives[name] = leader

    def run(self) -> None:
        """Until nothing is left. A request that nothing moves any more is found at once, not by waiting."""
        while True:
            is_last_act = self._act()
            if self.engine.has_work:
                self._step()
            elif is_last_act and not self.engine.has_work:
                break
            self.tick += 1
            assert self.tick < 5_000, "no end in sight"
        stuck = list(self.engine.scheduler.requests)
        assert not stuck, f"{stuck} wait for ever"
        self.engine.check_invariants()
        assert self.engine.stats().num_free_blocks == self.limits.num_blocks
        assert self.engine.stats().num_host_blocks == 0
        for life in self.lives.values():
            self._check_outcome(life)

    def _act(self) -> bool:
        """Do what the script says for this tick. True if nothing is left to be done."""
        is_done = True
        for life in self.lives.values():
            age = self.tick - life.script.arrival
            if age == 0 and life.leader is None:
                self.engine.submit(life.request)
        for name, life in self.lives.items():
            age = self.tick - life.script.arrival
            if age == life.script.continue_at:
                self._continue(life)
            if age == life.script.cancel_after:
                life.cancelled = True
                self.engine.cancel(RequestId(name))
                self.engine.check_invariants()
            if life.is_loading and life.load_at is not None and self.tick >= life.load_at:
                self._load_some(life)
            last_act = max(0, life.script.continue_at or 0, life.script.cancel_after or 0)
            is_done &= age >= last_act and not life.is_loading
        for due in [report for report in self.reports if report[0] <= self.tick]:
            self.reports.remove(due)
            self._check_content(due[1], due[2])
            self.engine.release_blocks(due[1].block_ids)
        return is_done and not self.reports

    def _continue(self, life: Life) -> None:
        first = fake_tokens(life.known, life.script.num_first_tokens, life.script.seed)
        life.tokens += first
        self.engine.continue_with(life.request.request_id, first)

    def _load_some(self, life: Life) -> None:
        for index in life.to_load[: life.script.blocks_per_tick]:
            values = fake_kv(life.known)[index * self.limits.block_size : (index + 1) * self.limits.block_size]
            is_lost, is_exact = index in life.script.lost_blocks, index not in life.script.inexact_blocks
            landed = [-1] * len(values) if is_lost else [value ^ (not is_exact) for value in values]
            self.runner.kv[life.block_table[index], : len(values)] = landed
            if not is_lost:
                self.engine.block_loaded(life.request.request_id, index, is_exact)
                life.has_inexact |= not is_exact
        del life.to_load[: life.script.blocks_per_tick]
        if not life.to_load:
            life.is_loading = False
            if life.script.is_stored:
                life.request.num_stored_tokens = len(life.known) // self.limits.block_size * self.limits.block_size
            self.engine.loading_done(life.request.request_id)

    def _step(self) -> None:
        running = list(self.engine.scheduler.running)
        num_plans = len(self.runner.plans)
        result = self.engine.step()
        self.engine.check_invariants()
        has_computed = len(self.runner.plans) > num_plans
        assert has_computed or not result.is_empty or not self.engine.has_work, "steps that do nothing, for ever"
        for plan in self.runner.plans[num_plans:]:
            self._check_nobody_overtakes(plan, running)
        self._read(result)
        for life in self.lives.values():
            if life.is_inexact:
                self._check_cached(life.request)

    def _check_nobody_overtakes(self, plan: StepPlan, running: list[Request]) -> None:
        """No newcomer is computed in a step in which one that held blocks, and still does, was not."""
        planned = {chunk.request.request_id for chunk in plan.chunks}
        left_out = [r for r in running if r.request_id not in planned and r.phase is Phase.RUNNING]
        newcomers = planned - {request.request_id for request in running}
        assert not (left_out and newcomers), f"{newcomers} overtook {left_out}"

    def _read(self, result: StepResult) -> None:
        assert not result.failed
        for admitted in result.admitted:
            self._admit(self.lives[admitted.request.request_id], admitted)
        for report in result.computed:
            self._take_report(self.lives[report.request_id], report)
        for output in result.outputs:
            self._take_output(self.lives[output.request_id], output)

    def _admit(self, life: Life, admitted: Admitted) -> None:
        assert life.leader is None, "forks come with their leader"
        if not life.script.loads:
            return
        cached = admitted.num_cached_tokens // self.limits.block_size
        end = life.request.num_stored_tokens if admitted.is_again else len(life.known)
        assert list(admitted.missing) == list(range(cached, -(-end // self.limits.block_size)))
        life.to_load = sorted(admitted.missing, key=lambda i: (i * 7) % 5)  # in no particular order
        life.block_table = admitted.block_table
        life.is_loading, life.load_at = True, self.tick + 1 + life.script.load_delay

    def _take_report(self, life: Life, report: ComputedBlocks) -> None:
        assert report.first_index == life.num_reported
        life.num_reported += len(report.block_ids)
        assert report.is_last == (life.num_reported == -(-len(life.known) // self.limits.block_size))
        self._check_content(report, life.known)
        self.reports.append((self.tick + life.script.release_delay, report, life.known))

    def _check_cached(self, request: Request) -> None:
        """Of its blocks, those that others can find hold what their hash says."""
        cache, block_size = self.engine.scheduler.tables.cache, self.limits.block_size
        found = [i for i, block in enumerate(request.block_table) if cache.is_registered(block)]
        values = fake_kv(request.token_ids[: (max(found) + 1) * block_size]) if found else []
        for i in found:
            expected = values[i * block_size : (i + 1) * block_size]
            assert list(self.runner.kv[request.block_table[i]]) == expected, f"others can find block {i} of {request}"

    def _check_content(self, report: ComputedBlocks, known: list[int]) -> None:
        """What was reported under a hash is right, and stays so until it is released; of exact lives, all of it."""
        values, is_inexact = fake_kv(known), self.lives[report.request_id].is_inexact
        for i, block, num_tokens in zip(range(10**6), report.block_ids, report.num_tokens, strict=False):
            if is_inexact and report.hashes[i] is None:
                continue
            start = (report.first_index + i) * self.limits.block_size
            assert list(self.runner.kv[block, :num_tokens]) == values[start : start + num_tokens]

    def _take_output(self, life: Life, output: SequenceOutput) -> None:
        assert life.reason is None, "spoke after its end"
        assert not life.cancelled or not output.token_ids, "generated after it was cancelled"
        life.tokens += output.token_ids
        life.reason = output.finish_reason

    def _check_outcome(self, life: Life) -> None:
        expected, reason = self._expected(life)
        if life.is_inexact:
            assert life.cancelled or life.reason, "neither finished nor cancelled"
        elif life.reason is None:
            assert life.cancelled, "neither finished nor cancelled"
            assert life.tokens == expected[: len(life.tokens)]
        else:
            assert life.tokens == expected
            assert life.reason is reason

    def _expected(self, life: Life) -> tuple[list[int], FinishReason]:
        """What it generates here (and the first token that it was given), by the rules alone."""
        script = life.script
        given = script.num_first_tokens if script.continue_at is not None else 0
        longest = min(self.limits.max_model_len, self.limits.num_blocks * self.limits.block_size + 1)
        room = script.max_tokens - script.num_moved_tokens
        if not script.hand_off:  # else it grows elsewhere
            room = max(given, min(room, longest - len(life.known)))
        tokens = fake_tokens(life.known, room, script.seed)
        for i in range(given, room):
            if script.stops and tokens[i] in STOP_TOKENS:
                return tokens[: i + 1], FinishReason.STOP
            if script.hand_off and i + 1 < room:
                return tokens[: i + 1], FinishReason.HANDED_OFF
        return tokens, FinishReason.LENGTH


def _request(name: str, script: Script) -> Request:
    awaits = {"blocks"} if script.loads else set()
    if script.continue_at is not None:
        awaits.add("continue")
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=list(script.prompt),
        output_token_ids=fake_tokens(script.prompt, script.num_moved_tokens, script.seed),
        sampling=SamplingParams(
            max_tokens=script.max_tokens,
            seed=script.seed,
            stop_token_ids=STOP_TOKENS if script.stops else frozenset(),
        ),
        priority=script.priority,
        hand_off=script.hand_off,
        arrival_s=float(script.arrival),
        awaits=awaits,
    )
