"""`kvasir bench quantization`: what `--quantization` does to a model's output, and how fast it decodes.

The built-in model in fp32 beside itself with its weights in fewer bytes: the next token's distribution at each position
of real text. Its weights lie on a grid of 4 bits, which flatters int4, so the same is done with 1 % of relative noise
on every weight.
"""

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir.bench.command_line import positive
from kvasir.bench.lab.bare_model import BLOCK_SIZE, BareModel
from kvasir.bench.lab.divergence import Divergence, add_positions
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.passages import make_prompts
from kvasir.bench.lab.rounds import in_turns, median_ratio, seconds
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.engine.blocks import num_blocks_for
from kvasir.kernels.linear import Quantization

_WAYS: tuple[Quantization, ...] = ("none", "fp16", "int8", "w8a8_int8", "int4", "w4a8_int8")
_BATCHES = (1, 8, 32)
_CONTEXT = 160  # of the decode steps

Seconds = dict[tuple[Quantization, int], list[float]]  # by way and number of sequences, one a round


class WeightLab:
    """One checkpoint, with its weights in each form."""

    def __init__(self, model: Path, num_tokens: int) -> None:
        self._models = {way: BareModel(model, way) for way in _WAYS}
        self._plain = self._models["none"]
        num_blocks = max(max(_BATCHES) * num_blocks_for(_CONTEXT, BLOCK_SIZE), num_blocks_for(num_tokens, BLOCK_SIZE))
        self._cache = self._plain.new_cache(num_blocks)

    def measure_quality(self, prompts: Sequence[Sequence[int]]) -> dict[Quantization, Divergence]:
        found = {way: Divergence() for way in _WAYS}
        for token_ids in prompts:
            batch = self._plain.batch(0, [token_ids])
            hidden = {way: model.hidden(batch, self._cache) for way, model in self._models.items()}
            add_positions(found, hidden, lambda way, rows: self._models[way].logits(rows))
        return found

    def measure_speed(self, num_rounds: int, quiet: Quiet) -> Seconds:
        """Of a decode step, logits included."""
        batches = {num_seqs: self._plain.batch(_CONTEXT - 1, [[7] * _CONTEXT] * num_seqs) for num_seqs in _BATCHES}

        def step(way: Quantization, num_seqs: int) -> Tensor:
            model = self._models[way]
            return model.logits(model.hidden(batches[num_seqs], self._cache))

        keys = [(way, num_seqs) for way in _WAYS for num_seqs in _BATCHES]
        return in_turns({key: partial(seconds, partial(step, *key)) for key in keys}, num_rounds, quiet)


def with_noise(model: Path, share: float, into: Path) -> Path:
    """The checkpoint again, each weight w as w (1 + share n), n of a standard normal distribution."""
    torch.manual_seed(1)
    for path in model.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            save_file(
                {name: one * (1 + share * torch.randn_like(one)) for name, one in tensors.items()}, into / path.name
            )
        elif path.suffix == ".json":
            shutil.copy(path, into)
    return into


def main(argv: list[str]) -> int:
    parser = lab_parser("quantization", __doc__)
    add = parser.add_argument
    add("--prompts", type=positive(int), default=8, help="how many texts")
    add("--tokens", type=positive(int), default=512, help="of each text, at most")
    add("--rounds", type=positive(int), default=15, help="of the speed measurement")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    prompts = [prompt.token_ids[: options.tokens] for prompt in make_prompts(model, options.prompts)]
    lab = WeightLab(model, options.tokens)
    times_s, plain = lab.measure_speed(options.rounds, quiet), lab.measure_quality(prompts)
    with tempfile.TemporaryDirectory() as name:
        noisy = WeightLab(with_noise(model, 0.01, Path(name)), options.tokens).measure_quality(prompts)
    rows = [_row(way, [plain[way], noisy[way]], times_s) for way in _WAYS]
    lines = [
        f"{model.name}, fp32 arithmetic; in w8a8_int8 and w4a8_int8, activations in 8 bits too. Against fp32,",
        f"over {sum(map(len, prompts)):,} positions of text (that of kv_quality.md): how often the most probable token",
        "is the same, and the mean Kullback-Leibler divergence in nats; then with 1 % of relative noise on weights,",
        "since the built-in ones lie on a grid of 4 bits (8 in the layer that gives logits, which has 8 here as well).",
        f"Decode step: sequences of {_CONTEXT} tokens, medians of {options.rounds} rounds in turns, and the",
        "ratio to fp32 in the same round (below 1 is faster).",
        "",
        *table("weights | same token | mean KL | same token, noise | mean KL, noise | step of 1 | of 8 | of 32", rows),
    ]
    about = quiet.about_machine(threads=torch.get_num_threads())
    write_page(options.output, "quantization.md", as_page("Weights in fewer bytes", about, lines))
    return 0


def _row(way: Quantization, divergences: Sequence[Divergence], times_s: Seconds) -> list[str]:
    cells: list[str] = ["fp32" if way == "none" else way]
    for divergence in divergences:
        cells += [f"{divergence.equal_best:.2%}", f"{divergence.mean_kl:.1e}"]
    for num_seqs in _BATCHES:
        own_s, ratio = times_s[way, num_seqs], median_ratio(times_s[way, num_seqs], times_s["none", num_seqs])
        cells.append(f"{statistics.median(own_s) * 1e3:.1f} ms, {ratio:.2f}")
    return cells
