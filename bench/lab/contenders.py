"""What is compared: transformers, our engine in this process, and a whole cluster over HTTP. All greedy, in fp32."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kvasir.bench.timeline import Timeline

Tokens = Sequence[int]
Quantization = Literal["none", "fp16", "int8", "int4", "w8a8_int8", "w4a8_int8"]


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    def prefill_s(self, prompt: Tokens) -> float:
        """From the prompt to its first token."""
        ...

    def decode_tokens_per_s(self, prompts: Sequence[Tokens], num_tokens: int) -> float:
        """Of all prompts together, while all of them are running."""
        ...


def steady_tokens_per_s(timelines: Sequence[Timeline]) -> float:
    """The rate while all requests ran: from the latest first chunk to the earliest last one.

    A chunk of several tokens counts as several.
    """
    start_s = max(timeline.arrivals_s[0] for timeline in timelines)
    end_s = min(timeline.ended_s for timeline in timelines)
    if end_s <= start_s:
        raise ValueError("the first request ended before the last one began: the answers are too short")
    num_tokens = 0.0
    for timeline in timelines:
        num_chunks = sum(start_s < arrival <= end_s for arrival in timeline.arrivals_s)
        num_tokens += num_chunks * timeline.num_output_tokens / len(timeline.arrivals_s)
    return num_tokens / (end_s - start_s)


class TransformersContender:
    """The library as its users run it: a forward pass; `generate` with a static batch."""

    name = "transformers"

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # in eval mode

    def prefill_s(self, prompt: Tokens) -> float:
        input_ids = self._torch.tensor([list(prompt)])
        started_s = time.perf_counter()
        with self._torch.inference_mode():
            self._model(input_ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
        return time.perf_counter() - started_s

    def decode_tokens_per_s(self, prompts: Sequence[Tokens], num_tokens: int) -> float:
        ends_s: list[float] = []

        def note_time(token_ids: object, scores: object) -> object:
            ends_s.append(time.perf_counter())
            return self._torch.zeros(len(prompts), dtype=self._torch.bool)  # and stop none of them

        self.generate(prompts, num_tokens, stopping_criteria=[note_time])
        return len(prompts) * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])

    def generate(self, prompts: Sequence[Tokens], num_tokens: int, **options: Any) -> list[list[int]]:
        """The tokens of each prompt: so many, for nothing stops early."""
        input_ids = self._torch.tensor([list(prompt) for prompt in prompts])
        output = self._model.generate(
            input_ids, attention_mask=self._torch.ones_like(input_ids), do_sample=False,
            max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0, **options,
        )  # fmt: skip
        found: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return found


class EngineContender:
    """Our engine, without processes or network around it, on the same threads as transformers."""

    name = "kvasir engine"

    def __init__(self, model: Path, quantization: Quantization = "none") -> None:
        from kvasir.engine.factory import build_engine
        from kvasir.engine.settings import EngineSettings

        settings = EngineSettings(
            model=str(model), kv_cache_memory=1 << 30, enable_prefix_caching=False, quantization=quantization
        )
        self._engine, *_ = build_engine(settings)

    def prefill_s(self, prompt: Tokens) -> float:
        (timeline,) = self._run([prompt], 1)
        return timeline.ttft_s

    def decode_tokens_per_s(self, prompts: Sequence[Tokens], num_tokens: int) -> float:
        return steady_tokens_per_s(self._run(prompts, num_tokens))

    def generate(self, prompts: Sequence[Tokens], num_tokens: int) -> list[list[int]]:
        """The tokens of each prompt."""
        from kvasir.bench.lab.engine_runs import new_requests, run_to_end

        requests = new_requests(prompts, num_tokens)
        run_to_end(self._engine, requests)
        return [request.output_token_ids for request in requests]

    def _run(self, prompts: Sequence[Tokens], num_tokens: int) -> list[Timeline]:
        from kvasir.bench.lab.engine_runs import new_requests, submit_all

        requests = new_requests(prompts, num_tokens)
        arrivals_s: dict[str, list[float]] = {request.request_id: [] for request in requests}
        sent_s = time.perf_counter()
        submit_all(self._engine, requests)
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                arrivals_s[output.request_id].append(time.perf_counter())
        return [
            Timeline(sent_s=sent_s, arrivals_s=tuple(times), num_output_tokens=len(times))
            for times in arrivals_s.values()
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One number, measured for each contender in turn."""

    name: str
    unit: str
    prompt_lens: tuple[int, ...]
    num_tokens: int = 1
    more_is_better: bool = False

    def measure(self, contender: Contender, prompts: Sequence[Tokens]) -> float:
        if self.num_tokens == 1:
            return contender.prefill_s(prompts[0]) * 1e3
        return contender.decode_tokens_per_s(prompts, self.num_tokens)


CASES = (
    Case("prefill of 512 tokens", "ms", (512,)),
    Case("prefill of 2000 tokens", "ms", (2000,)),
    Case("decode, 16 at once", "tokens/s", (32,) * 16, num_tokens=128, more_is_better=True),
)
