"""`kvasir bench step`: a step of the engine on this CPU, each figure as a share of its floor, measured in the same run.

A decode step cannot be faster than reading weights, keys and values once, nor than its products at the speed of a
large one; a prompt cannot be faster than its products. Floors and forms of the weights take turns in every round. A
run measures what it is asked to; what earlier runs found of other things stays in the folder, each with its own floors.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kvasir.bench.command_line import positive
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import lab_parser
from kvasir.bench.lab.step_profile import profile_steps
from kvasir.bench.lab.step_report import Case, Floors, Measured, Work, floor_s, write_results
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.engine.batch import BatchInputs, build_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Chunk
from kvasir.kernels.cpu import huge_pages
from kvasir.kernels.linear import Quantization

FORMS: dict[str, Quantization] = {
    "fp32": "none", "fp16": "fp16", "int8": "int8", "w8a8": "w8a8_int8", "int4": "int4", "w4a8": "w4a8_int8"
}  # fmt: skip
DECODES = tuple(Case(num_seqs, context, 1) for context in (128, 1024) for num_seqs in (1, 8, 16, 32))
PREFILLS = (Case(1, 0, 512), Case(1, 0, 2000))
_BLOCK_SIZE = 16
_PROFILED = Case(16, 128, 1)  # that long it grows at most
_DRAWN = SamplingParams(temperature=0.8, top_p=0.95)
_CPU = torch.device("cpu")


class StepLab:
    """One checkpoint with its weights in each form, and one KV cache for all of them."""

    def __init__(self, directory: Path, forms: list[str], cases: tuple[Case, ...]) -> None:
        self.config = read_model_config(directory)
        self.models = {
            form: load_model(directory, replace(self.config, quantization=FORMS[form]), torch.float32, _CPU)
            for form in forms
        }
        layout = kv_layout(self.config, _BLOCK_SIZE, torch.float32)
        self.cache = KVCache(layout, max(case.num_seqs * _num_blocks(case) for case in (*cases, _PROFILED)), _CPU)
        self.cache.data.fill_(0.01)
        self._tables = rope_tables(
            self.config.ropes, self.config.head_dim, max(case.end for case in (*cases, _PROFILED))
        )
        self.work = Work.of(self.config, layout.bytes_per_block / _BLOCK_SIZE)

    def batch(self, case: Case) -> BatchInputs:
        blocks = _num_blocks(case)
        chunks = []
        for s in range(case.num_seqs):
            request = Request(
                request_id=RequestId(str(s)),
                prompt_token_ids=[5] * case.end,
                block_table=[BlockId(s * blocks + i) for i in range(blocks)],
            )
            chunks.append(Chunk(request, case.context, case.num_tokens))
        return build_batch(chunks, _BLOCK_SIZE, self._tables, _CPU)

    def step(self, form: str, batch: BatchInputs) -> None:
        """The model alone: hidden states, and the logits of each sequence's last token."""
        model = self.models[form]
        model.logits(model.forward(batch, self.cache.data)[batch.sampled_tokens])

    def measure(self, case: Case, num_rounds: int, yardstick: "Yardstick") -> list[Measured]:
        """Medians. The floors are looked at in each round, for memory is not as fast at all times."""
        batch = self.batch(case)
        looks: list[Floors] = []
        times_s: dict[str, list[float]] = {form: [] for form in self.models}
        for _ in range(1 + num_rounds):  # at first, loops are loaded and steps of decodes recorded
            looks.append(yardstick.measure())
            for form, taken in times_s.items():
                taken.append(_seconds(partial(self.step, form, batch)))
        floors = Floors(
            statistics.median(look.bytes_per_s for look in looks[1:]),
            statistics.median(look.flop_per_s for look in looks[1:]),
        )
        return [
            Measured(case.name, form, statistics.median(taken[1:]), floor_s(self.work, form, floors, case), floors)
            for form, taken in times_s.items()
        ]


class Yardstick:
    """What floors are made of, on the threads that torch computes on: sums of 256 MiB, a product of 17 GFLOP.

    In large pages, as the weights are.
    """

    def __init__(self) -> None:
        self._source = huge_pages.empty((64 << 20,), torch.float32).normal_()
        self._a, self._b, self._product = (huge_pages.empty((2048, 2048), torch.float32).normal_() for _ in range(3))

    def measure(self) -> Floors:
        read_s = statistics.median(_seconds(self._source.sum) for _ in range(3))
        product_s = _seconds(partial(torch.mm, self._a, self._b, out=self._product))
        return Floors(self._source.nbytes / read_s, 2 * 2048**3 / product_s)


def _num_blocks(case: Case) -> int:
    return -(-case.end // _BLOCK_SIZE)


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@torch.inference_mode()
def measure_steps(lab: StepLab, cases: tuple[Case, ...], num_rounds: int, quiet: Quiet) -> list[Measured]:
    found: list[Measured] = []
    yardstick = Yardstick()
    for case in cases:
        quiet.look()
        found += lab.measure(case, num_rounds, yardstick)
        for one in found[-len(lab.models) :]:
            print(one.line(), file=sys.stderr, flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = lab_parser("step", __doc__)
    add, parts = parser.add_argument, ["decode", "prefill", "profile"]
    add("--model", type=Path, metavar="DIR", help="(default: the built-in model)")
    add("--weights", nargs="+", default=list(FORMS), choices=list(FORMS), metavar="FORM", help=f"of {', '.join(FORMS)}")
    add("--parts", nargs="+", default=parts, choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    add("--rounds", type=positive(int), default=5, help="measurements of each number")
    options = parser.parse_args(argv)
    cases = (DECODES if "decode" in options.parts else ()) + (PREFILLS if "prefill" in options.parts else ())
    quiet = Quiet()
    lab = StepLab(options.model or prepare_builtin_model(), options.weights, cases)
    measured = measure_steps(lab, cases, options.rounds, quiet) if cases else []
    profiles = []
    if "profile" in options.parts:
        quiet.look()
        for form, model in lab.models.items():
            for name, sampling in (form, SamplingParams()), (f"{form}, drawn", _DRAWN):
                profiles.append(profile_steps(name, model, lab.cache, _PROFILED.num_seqs, 60, sampling))
                print(profiles[-1], file=sys.stderr, flush=True)
    about = quiet.about_machine(threads=torch.get_num_threads())
    print(write_results(options.output, about, measured, profiles))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
