"""`kvasir bench itl`: what prompts that are computed on a decode node do to those who wait for their next token.

Our own engine with the built-in model, in this process: some requests decode all the time, and prompts come one after
the other. With steps of fixed sizes, from large to small, and with a target.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvasir.bench.command_line import positive
from kvasir.bench.lab.engine_runs import new_request, run_until_all_decode
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.prompts import random_prompt
from kvasir.bench.lab.rounds import in_turns
from kvasir.bench.markdown import table
from kvasir.bench.timeline import percentile
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.request import Request
from kvasir.engine.settings import EngineSettings
from kvasir.engine.step_budget import StepBudget

_BLOCK_SIZE = 16
_MOST = 256  # prompt tokens of a step
_FIXED = (_MOST, 128, 64, 32)
_CACHE_BYTES = 700 << 20


@dataclass(slots=True)
class Outcome:
    itl_s: list[float] = field(default_factory=list)  # one a step: all who decode have one token in each
    ttft_s: list[float] = field(default_factory=list)  # of the prompts


class FixedBudget(StepBudget):
    """So many prompt tokens a step, whatever they cost."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(1.0, 1)
        self._num_tokens = num_tokens

    def num_prefill_tokens(self, num_decoding: int, most: int) -> int:
        return min(self._num_tokens, most)


class ItlLab:
    def __init__(self, model: Path) -> None:
        settings = EngineSettings(
            model=str(model), kv_cache_memory=_CACHE_BYTES, max_num_batched_tokens=_MOST + 64, watermark=0.0
        )
        self.engine: Engine = build_engine(settings)[0]
        self._rng = random.Random(0)

    def warm_up(self, num_decoding: int, num_prompt_tokens: int) -> None:
        """Whatever is done once is done: for a batch of this size, and for a product of each size that may come."""
        self.run(FixedBudget(_MOST), num_decoding, 1, num_prompt_tokens)
        for num_tokens in range(_BLOCK_SIZE, _MOST + 1, _BLOCK_SIZE):
            self.run(FixedBudget(num_tokens), num_decoding, 1, 2 * num_tokens, num_plain_steps=1)

    def decode_step_s(self, num_decoding: int) -> float:
        """Of a step without prompts, the median."""
        return statistics.median(self.run(FixedBudget(1), num_decoding, num_prompts=0, num_prompt_tokens=0).itl_s)

    def run(
        self, budget: StepBudget, num_decoding: int, num_prompts: int, num_prompt_tokens: int, num_plain_steps: int = 6
    ) -> Outcome:
        """The next prompt comes when the last one has its first token, and a few steps have passed."""
        engine = self.engine
        engine.scheduler.step_budget = None
        decoding = [self._request(f"d{i}", 48, 10_000) for i in range(num_decoding)]
        run_until_all_decode(engine, decoding)
        engine.scheduler.step_budget = budget
        outcome = Outcome()
        for number in range(max(num_prompts, 1)):
            for _ in range(num_plain_steps):
                self._step(outcome)
            if num_prompts:
                prompt = self._request(f"p{number}", num_prompt_tokens, 1)
                submitted_s = time.perf_counter()
                engine.submit(prompt)
                while not prompt.output_token_ids:
                    self._step(outcome)
                outcome.ttft_s.append(time.perf_counter() - submitted_s)
        for request in decoding:
            engine.cancel(request.request_id)
        return outcome

    def _step(self, outcome: Outcome) -> None:
        started_s = time.perf_counter()
        self.engine.step()
        outcome.itl_s.append(time.perf_counter() - started_s)

    def _request(self, name: str, num_prompt_tokens: int, num_tokens: int) -> Request:
        return new_request(name, random_prompt(self._rng, num_prompt_tokens), num_tokens)


def row(name: str, rounds: Sequence[Outcome], target_s: float, num_prompt_tokens: int) -> list[str]:
    """Medians over the rounds."""
    figures = []
    for outcome in rounds:
        itl_ms = [1e3 * s for s in outcome.itl_s]
        kept = sum(s <= target_s for s in outcome.itl_s) / len(itl_ms)
        ttft_s = statistics.mean(outcome.ttft_s)
        figures.append((percentile(itl_ms, 50), percentile(itl_ms, 99), max(itl_ms), kept, ttft_s))
    p50, p99, most, kept, ttft_s = (statistics.median(column) for column in zip(*figures, strict=True))
    rate = num_prompt_tokens / ttft_s
    return [name, f"{p50:.0f}", f"{p99:.0f}", f"{most:.0f}", f"{kept:.1%}", f"{ttft_s:.2f} s", f"{rate:.0f}"]


def main(argv: list[str]) -> int:
    parser = lab_parser("itl", __doc__)
    add = parser.add_argument
    add("--decoding", type=positive(int), default=8, help="requests that decode")
    add("--prompts", type=positive(int), default=3, help="in each round")
    add("--prompt-tokens", type=positive(int), default=512, help="tokens of each prompt")
    add("--rounds", type=positive(int), default=3, help="all ways once in each")
    options = parser.parse_args(argv)
    lab, quiet = ItlLab(prepare_builtin_model()), Quiet()
    lab.warm_up(options.decoding, options.prompt_tokens)
    plain_s = lab.decode_step_s(options.decoding)
    target_s = 3 * plain_s
    budgets: dict[str, StepBudget] = {f"at most {most}": FixedBudget(most) for most in _FIXED}
    budgets[f"target {1e3 * target_s:.0f} ms"] = StepBudget(target_s, _BLOCK_SIZE)
    works = {
        name: partial(lab.run, budget, options.decoding, options.prompts, options.prompt_tokens)
        for name, budget in budgets.items()
    }
    # When a round counts, the target has been kept for one, as on a node that has run for a while.
    outcomes = in_turns(works, options.rounds, quiet)
    header = "prompt tokens a step | ITL p50 | ITL p99 | largest | in time | TTFT of the prompts | prompt tokens/s"
    lines = [
        f"smollm2-135m-instruct in fp32, {options.decoding} requests decoding; prompts of {options.prompt_tokens}",
        "tokens, one after the other, computed on the same node. A step without a prompt takes",
        f"{1e3 * plain_s:.0f} ms (median); the target is three times that. ITL in ms, over all steps;",
        f"medians of {options.rounds} rounds, the ways taking turns.",
        "",
        *table(header, [row(name, own, target_s, options.prompt_tokens) for name, own in outcomes.items()]),
    ]
    title = "Prompts beside decoding: the time between two tokens"
    write_page(options.output, "itl.md", as_page(title, quiet.about_machine(), lines))
    return 0
