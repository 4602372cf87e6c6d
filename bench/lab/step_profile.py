"""Where a step of the engine goes: each part of it timed where the engine calls it, and nothing else changed."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvasir.bench.lab.step_report import Profile
from kvasir.engine.engine import Engine
from kvasir.engine.forward_pass import Model
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import sample
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.kernels.cpu import threads

_PROMPT_LEN = 24
_WARM_UP = 3  # steps
_GREEDY = SamplingParams()


class _Clock:
    """Seconds spent in each part, of one step."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._is_model = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s[part] += time.perf_counter() - started_s

        return call

    def model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("model", function)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_model = True
            try:
                return timed(*args, **kwargs)
            finally:
                self._is_model = False

        return call

    def loops_of_the_model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sampling has a loop too, which counts as sampling."""
        timed = self.timed("loops", function)
        return lambda *args, **kwargs: (timed if self._is_model else function)(*args, **kwargs)


class _TimedModel:
    def __init__(self, model: Model, clock: _Clock) -> None:
        self.config = model.config
        self.forward = clock.model(model.forward)
        self.logits = clock.model(model.logits)


def profile_steps(
    form: str, model: Model, cache: KVCache, num_seqs: int, num_steps: int, sampling: SamplingParams = _GREEDY
) -> Profile:
    """Of steps in which all of `num_seqs` requests decode."""
    clock = _Clock()
    max_model_len = _PROMPT_LEN + _WARM_UP + num_steps + 8
    limits = Limits(
        block_size=cache.layout.block_size, num_blocks=cache.num_blocks,
        max_num_batched_tokens=num_seqs * _PROMPT_LEN, max_num_seqs=num_seqs, max_model_len=max_model_len,
        watermark=0, enable_prefix_caching=True,
    )  # fmt: skip
    runner = ModelRunner(_TimedModel(model, clock), cache, max_model_len)
    engine = Engine(Scheduler(limits), runner)
    sampling = replace(sampling, max_tokens=_WARM_UP + num_steps + 4)
    requests = [
        Request(request_id=RequestId(str(s)), prompt_token_ids=[5 + s] * _PROMPT_LEN, sampling=sampling)
        for s in range(num_seqs)
    ]
    for request in requests:
        engine.submit(request)
    while min(len(request.output_token_ids) for request in requests) < _WARM_UP:
        engine.step()
    with (
        patch.object(engine.scheduler, "schedule", clock.timed("schedule", engine.scheduler.schedule)),
        patch.object(engine.model_runner, "execute", clock.timed("execute", runner.execute)),
        patch.object(threads, "launch", clock.loops_of_the_model(threads.launch)),
        patch("kvasir.engine.model_runner.sample", clock.timed("sample", sample)),
    ):
        steps = [_step(engine, clock) for _ in range(num_steps)]
    parts_ms = {name: statistics.median(step[name] for step in steps) * 1e3 for name in steps[0] if name != "step"}
    return Profile(
        form=form,
        num_seqs=num_seqs,
        step_ms=statistics.median(step["step"] for step in steps) * 1e3,
        parts_ms=parts_ms,
        share_of_all_but_loops=statistics.median(1 - step["loops of the model"] / step["step"] for step in steps),
    )


def _step(engine: Engine, clock: _Clock) -> dict[str, float]:
    clock.spent_s.clear()
    started_s = time.perf_counter()
    engine.step()
    step_s = time.perf_counter() - started_s
    spent_s = clock.spent_s
    return {
        "schedule": spent_s["schedule"],
        "build the batch": spent_s["execute"] - spent_s["model"] - spent_s["sample"],
        "loops of the model": spent_s["loops"],
        "around them": spent_s["model"] - spent_s["loops"],
        "sample": spent_s["sample"],
        "commit": step_s - spent_s["schedule"] - spent_s["execute"],
        "step": step_s,
    }
