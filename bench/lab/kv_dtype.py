"""`kvasir bench kv-dtype`: what `--kv-cache-dtype` gives and costs: capacity, transfers, accuracy, speed.

The same model in fp32, with its cache in fp32, fp16 and int8. Accuracy: the next token's distribution at each position
of real text, held against the cache in fp32. Speed: decode steps and prefill chunks, the dtypes in turn in each round.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvasir.bench.command_line import positive
from kvasir.bench.lab.bare_model import BLOCK_SIZE, BareModel, chunks_behind
from kvasir.bench.lab.divergence import Divergence, add_positions
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.passages import make_prompts
from kvasir.bench.lab.rounds import in_turns, median_ratio, seconds
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.engine.blocks import KVLayout, num_blocks_for
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.step import Chunk, StepPlan
from kvasir.kernels.kv_rows import views_of

_DTYPES = ("fp32", "fp16", "int8")
_NUM_SEQS = 8
_CHUNK = 512

Seconds = Mapping[tuple[str, str], Sequence[float]]  # by dtype and kind of step, one a round


class DtypeLab:
    """One model, and a cache of each dtype, large enough for `_NUM_SEQS` sequences of `num_tokens`."""

    def __init__(self, model: Path, num_tokens: int) -> None:
        self.model = BareModel(model)
        num_blocks = _NUM_SEQS * num_blocks_for(num_tokens, BLOCK_SIZE)
        self._caches = {name: self.model.new_cache(num_blocks, name) for name in _DTYPES}
        self.layouts = {name: cache.layout for name, cache in self._caches.items()}
        self._runners = {name: ModelRunner(self.model.model, cache, num_tokens) for name, cache in self._caches.items()}
        for cache in self._caches.values():
            _fill(cache.data)

    def run(self, name: str, chunks: Sequence[Chunk]) -> None:
        self._runners[name].execute(StepPlan(tuple(chunks)))

    def hidden(self, name: str, token_ids: Sequence[int]) -> Tensor:
        """[T, C], in chunks, so that what has been written is read again"""
        batches = [self.model.batch(start, [token_ids[: start + _CHUNK]]) for start in range(0, len(token_ids), _CHUNK)]
        return torch.cat([self.model.hidden(batch, self._caches[name]) for batch in batches])


def _fill(kv_cache: Tensor) -> None:
    """Values of a size as real ones have, everywhere: zeros would be read from one page."""
    values, scales = views_of(kv_cache)
    if scales is None:
        values.normal_()
    else:
        values.random_(-127, 128)
        scales.fill_(0.02)


def measure_quality(lab: DtypeLab, prompts: Sequence[Sequence[int]]) -> dict[str, Divergence]:
    """Against the cache in fp32."""
    found = {name: Divergence() for name in _DTYPES}
    for token_ids in prompts:
        hidden = {name: lab.hidden(name, token_ids) for name in _DTYPES}
        add_positions(found, hidden, lambda _, rows: lab.model.logits(rows))
    return found


def measure_speed(lab: DtypeLab, context: int, num_rounds: int, quiet: Quiet) -> Seconds:
    steps = {
        "decode": chunks_behind(context - 1, [[7] * context] * _NUM_SEQS),
        "prefill": chunks_behind(max(context - _CHUNK, 0), [[7] * context]),
    }
    works = {(name, kind): partial(seconds, partial(lab.run, name, steps[kind])) for name in _DTYPES for kind in steps}
    return in_turns(works, num_rounds, quiet)


def as_table(layouts: Mapping[str, KVLayout], divergences: Mapping[str, Divergence], times_s: Seconds) -> list[str]:
    rows = []
    for name, layout in layouts.items():
        divergence = divergences[name]
        decode_s, prefill_s = times_s[name, "decode"], times_s[name, "prefill"]
        row = [
            name,
            f"{(1 << 30) // layout.bytes_per_block * layout.block_size:,}",
            f"{layout.bytes_per_block:,}",
            f"{divergence.equal_best:.2%}",
            f"{divergence.mean_kl:.1e}",
            f"{divergence.largest_kl:.1e}",
            f"{statistics.median(decode_s) * 1e3:.1f}",
            f"{median_ratio(decode_s, times_s['fp32', 'decode']):.2f}",
            f"{statistics.median(prefill_s) * 1e3:.0f}",
            f"{median_ratio(prefill_s, times_s['fp32', 'prefill']):.2f}",
        ]
        rows.append(row)
    header = "cache | tokens a GiB | bytes of a block | best token equal | mean KL | largest KL | "
    return table(header + "decode step ms | to fp32 | prefill chunk ms | to fp32", rows)


def main(argv: list[str]) -> int:
    parser = lab_parser("kv-dtype", __doc__)
    add = parser.add_argument
    add("--prompts", type=positive(int), default=12, help="how many texts")
    add("--context", type=positive(int), default=1500, help="tokens of each sequence")
    add("--rounds", type=positive(int), default=15, help="of the speed measurement")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    lab = DtypeLab(model, options.context)
    times_s = measure_speed(lab, options.context, options.rounds, quiet)
    prompts = [prompt.token_ids[: options.context] for prompt in make_prompts(model, options.prompts)]
    divergences = measure_quality(lab, prompts)
    lines = [
        f"{model.name} in fp32. A block is {BLOCK_SIZE} tokens; its bytes are what travels. Accuracy over",
        f"{sum(map(len, prompts)):,} positions of text (that of kv_quality.md). Decode: {_NUM_SEQS} sequences of",
        f"{options.context:,} tokens; prefill: the last {_CHUNK} of as many. Whole steps, medians of {options.rounds}",
        "rounds.",
        "",
        *as_table(lab.layouts, divergences, times_s),
    ]
    about = quiet.about_machine(threads=torch.get_num_threads())
    write_page(options.output, "kv_dtype.md", as_page("The KV cache in fewer bytes", about, lines))
    return 0
