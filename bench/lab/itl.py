"""`kvasir bench itl`: what prompts that are computed on a decode node do to those who wait for their next token.

Our own engine with the built-in model, in this process: some requests decode all the time, and prompts come one after
the other. With steps of fixed sizes, from large to small, and with a target. Written to a folder as a table.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.bench.timeline import percentile
from kvasir.cli.model import prepare_builtin_model
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.engine.step_budget import StepBudget

_BLOCK_SIZE = 16
_MOST = 256  # prompt tokens of a step
_FIXED = (_MOST, 128, 64, 32)
_CACHE_BYTES = 700 << 20
_VOCABULARY = 40_000


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
        for request in decoding:
            engine.submit(request)
        while not all(request.output_token_ids for request in decoding):
            engine.step()
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

    def _request(self, name: str, num_tokens: int, max_tokens: int) -> Request:
        prompt = [self._rng.randrange(100, _VOCABULARY) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request(request_id=RequestId(name), prompt_token_ids=prompt, sampling=sampling)


def row(name: str, rounds: Sequence[Outcome], target_s: float, num_prompt_tokens: int) -> str:
    """Medians over the rounds."""
    figures = []
    for outcome in rounds:
        itl_ms = [1e3 * s for s in outcome.itl_s]
        kept = sum(s <= target_s for s in outcome.itl_s) / len(itl_ms)
        ttft_s = statistics.mean(outcome.ttft_s)
        figures.append((percentile(itl_ms, 50), percentile(itl_ms, 99), max(itl_ms), kept, ttft_s))
    p50, p99, most, kept, ttft_s = (statistics.median(column) for column in zip(*figures, strict=True))
    rate = num_prompt_tokens / ttft_s
    return f"| {name} | {p50:.0f} | {p99:.0f} | {most:.0f} | {kept:.1%} | {ttft_s:.2f} s | {rate:.0f} |"


def main(argv: list[str]) -> int:
    description = (__doc__ or "").partition("\n")[2].strip()
    parser = argparse.ArgumentParser(prog="kvasir bench itl", description=description)
    parser.add_argument("--decoding", type=int, default=8, help="requests that decode (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=3, help="in each round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="all ways once in each (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    lab, quiet = ItlLab(prepare_builtin_model()), Quiet()
    lab.warm_up(options.decoding, options.prompt_tokens)
    plain_s = lab.decode_step_s(options.decoding)
    target_s = 3 * plain_s
    budgets: dict[str, StepBudget] = {f"at most {most}": FixedBudget(most) for most in _FIXED}
    adaptive = budgets[f"target {1e3 * target_s:.0f} ms"] = StepBudget(target_s, _BLOCK_SIZE)
    lab.run(adaptive, options.decoding, 1, options.prompt_tokens)  # as on a node that has run for a while
    outcomes: dict[str, list[Outcome]] = {name: [] for name in budgets}
    for _ in range(options.rounds):
        quiet.look()
        for name, budget in budgets.items():
            outcomes[name].append(lab.run(budget, options.decoding, options.prompts, options.prompt_tokens))
    about = machine() | {"busy_with_other_things": str(quiet)}
    text = [
        "# Prompts beside decoding: the time between two tokens",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"smollm2-135m-instruct in fp32, {options.decoding} requests decoding; prompts of {options.prompt_tokens}",
        "tokens, one after the other, computed on the same node. A step without a prompt takes",
        f"{1e3 * plain_s:.0f} ms (median); the target is three times that. ITL in ms, over all steps;",
        f"medians of {options.rounds} rounds, the ways taking turns.",
        "",
        "| prompt tokens a step | ITL p50 | ITL p99 | largest | in time | TTFT of the prompts | prompt tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(row(name, rounds, target_s, options.prompt_tokens) for name, rounds in outcomes.items()),
        "",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "itl.md").write_text("\n".join(text))
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
