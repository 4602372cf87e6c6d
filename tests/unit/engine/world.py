"""All that surrounds an engine, acting from a script: arrivals, transfers, first tokens, cancels, releases.

Each tick the script acts, then the engine steps if it has work; after each step everything that must hold is checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.step import Admitted, ComputedBlocks, PromptLogprobs, SequenceOutput, StepPlan, StepResult
from kvasir.engine.swap_space import SwapSpace
from tests.fakes import fake_kv, fake_score
from tests.unit.engine.checking_runner import CheckingRunner, Host, ticking
from tests.unit.engine.drafting import Always, Oracle
from tests.unit.engine.script import FAILED, Life, Script


@dataclass(frozen=True)
class Surroundings:
    """What there is beside the cache, and what it costs, in the units of a step's time: each step takes one."""

    num_host_blocks: int = 0
    copy_s: float = 0.0  # of one block
    fetch_s: float | None = None  # of one block; None: never measured
    num_drafts: int = 0  # at most, for each request and step


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
            oracle = Oracle(lambda request, most: self.lives[request.request_id].next_tokens(most))
            self.engine.speculator = Speculator(oracle, scheduler, surroundings.num_drafts, Always())
        self.runner.scheduler = scheduler
        self.lives: dict[str, Life] = {}
        for i, script in enumerate(scripts):
            self._add(f"r{i}", script)
        self.runner.breaks_after = {RequestId(name): life.script.breaks_after for name, life in self.lives.items()}
        self.reports: list[tuple[int, ComputedBlocks, list[int]]] = []  # (when to release, report, its tokens)
        self.newcomers: list[Request] = []  # that no step has considered yet
        self.tick = 0

    def _add(self, name: str, script: Script) -> None:
        leader = Life(script, script.request(name))
        wants = replace(script.wants, prompt_logprobs=None)
        for number, cancel_after in enumerate(script.forks, start=1):
            of_fork = replace(
                script,
                loads=False,
                seed=script.seed + number,
                cancel_after=cancel_after,
                breaks_after=None,
                wants=wants,
            )
            fork = Life(of_fork, of_fork.request(f"{name}.{number}"), leader=leader)
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
                self.newcomers.append(life.request)
        for name, life in self.lives.items():
            age = self.tick - life.script.arrival
            if age == life.script.rule_delay and life.script.rule is not None and life.leader is None:
                self.engine.grammar_ready(RequestId(name), life.script.rule.matcher)
            if age == life.script.continue_at:
                life.tokens += life.first_tokens
                self.engine.continue_with(RequestId(name), life.first_tokens)
            if age == life.script.cancel_after:
                life.cancelled = True
                self.engine.cancel(RequestId(name))
                self.engine.check_invariants()
            if life.is_loading and life.load_at is not None and self.tick >= life.load_at:
                self._load_some(life)
            is_done &= age >= life.script.last_act and not life.is_loading
        for due in [report for report in self.reports if report[0] <= self.tick]:
            self.reports.remove(due)
            self._check_content(due[1], due[2])
            self.engine.release_blocks(due[1].block_ids)
        return is_done and not self.reports

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
        newcomers = [one.request_id for one in self.newcomers if one.phase is Phase.WAITING]
        self.newcomers.clear()
        result = self.engine.step()
        self.engine.check_invariants()
        admitted = [one.request.request_id for one in result.admitted if one.request.request_id in newcomers]
        assert sorted((*admitted, *result.passed_over)) == sorted(newcomers), "each hears at once, and only once"
        has_computed = len(self.runner.plans) > num_plans
        assert has_computed or not result.is_empty or not self.engine.has_work, "steps that do nothing, for ever"
        for plan in self.runner.plans[num_plans:]:
            self._check_nobody_overtakes(plan, running)
        self._read(result)
        salts: dict[BlockId, str] = {}
        for life in self.lives.values():
            for block in life.request.block_table:
                assert salts.setdefault(block, life.script.salt) == life.script.salt, "one block for two salts"
            if life.is_inexact:
                self._check_cached(life.request)

    def _check_nobody_overtakes(self, plan: StepPlan, running: list[Request]) -> None:
        """No newcomer is computed in a step in which one that held blocks, and still does, was not; but for long
        prompts, where they are to be passed."""
        planned = {chunk.request.request_id for chunk in plan.chunks}
        left_out = [r for r in running if r.request_id not in planned and r.phase is Phase.RUNNING]
        if self.limits.max_long_partial_prefills:
            left_out = [r for r in left_out if r.num_tokens <= self.limits.long_prefill_token_threshold]
        newcomers = planned - {request.request_id for request in running}
        assert not (left_out and newcomers), f"{newcomers} overtook {left_out}"

    def _read(self, result: StepResult) -> None:
        for admitted in result.admitted:
            self._admit(self.lives[admitted.request.request_id], admitted)
        for scores in result.prompt_logprobs:
            self._take_scores(self.lives[scores.request_id], scores)
        for report in result.computed:
            self._take_report(self.lives[report.request_id], report)
        for output in result.outputs:
            self._take_output(self.lives[output.request_id], output)
        for failed in result.failed:
            life = self.lives[failed.request_id]
            assert life.end is None, "failed after its end"
            life.end = FAILED

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

    def _take_scores(self, life: Life, scores: PromptLogprobs) -> None:
        assert scores.first_position == life.num_scored + 1
        life.num_scored += len(scores.positions)
        expected = (fake_score(life.script.prompt, 1 + i) for i in range(life.num_scored))
        assert scores.positions == tuple(expected)[scores.first_position - 1 :]

    def _take_report(self, life: Life, report: ComputedBlocks) -> None:
        end = report.first_index + len(report.block_ids)
        if life.script.hand_off:
            assert report.first_index == life.num_reported
            assert report.is_last == (end == -(-len(life.known) // self.limits.block_size))
        else:
            assert report.first_index >= life.num_reported
            assert set(report.num_tokens) == {self.limits.block_size}
        life.num_reported = end
        tokens = life.request.token_ids[: end * self.limits.block_size]
        self._check_content(report, tokens)
        self.reports.append((self.tick + life.script.release_delay, report, tokens))

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
        assert life.end is None, "spoke after its end"
        assert not life.cancelled or not output.token_ids, "generated after it was cancelled"
        assert len(output.logprobs) == (len(output.token_ids) if life.script.wants.logprobs is not None else 0)
        life.tokens += output.token_ids
        life.end = output.finish_reason

    def _check_outcome(self, life: Life) -> None:
        expected, end = life.expected(self.limits)
        assert life.cancelled or life.end, "neither finished nor cancelled"
        if life.is_inexact:
            return
        breaks_with_leader = life.leader is not None and life.leader.script.breaks_after is not None
        if life.end is None or (life.end == FAILED and breaks_with_leader):
            assert life.tokens == expected[: len(life.tokens)]
        else:
            assert (life.tokens, life.end) == (expected, end)
            if life.script.wants.prompt_logprobs is not None and end != FAILED:
                assert life.num_scored == len(life.script.prompt) - 1
