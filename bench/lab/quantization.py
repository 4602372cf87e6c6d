"""`kvasir bench quantization`: what `--quantization` does to a model's output, and how fast it decodes.

The built-in model in fp32 beside itself with its weights in fewer bytes: the next token's distribution at each position
of real text. Its weights lie on a grid of 4 bits, which flatters int4, so the same is done with 1 % of relative noise
on every weight.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir.bench.lab.kv_quality_text import make_prompts
from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.cli.model import prepare_builtin_model
from kvasir.engine.batch import build_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk
from kvasir.kernels.linear import Quantization

_WAYS: tuple[Quantization, ...] = ("none", "fp16", "int8", "w8a8_int8", "int4", "w4a8_int8")
_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_BATCHES = (1, 8, 32)
_CONTEXT = 160  # of the decode steps
_ROWS_AT_ONCE = 64  # of logits


@dataclass(eq=False, slots=True)
class Quality:
    """Against fp32, over positions of text."""

    num_equal: int = 0  # the most probable token is the same
    kls: list[float] = field(default_factory=list)  # nats


class WeightLab:
    """One checkpoint, with its weights in each form."""

    def __init__(self, model: Path, num_tokens: int) -> None:
        config = read_model_config(model)
        self._models = {way: load_model(model, replace(config, quantization=way), torch.float32, _CPU) for way in _WAYS}
        self._ropes = rope_tables(config.ropes, config.head_dim, config.max_position)
        self._blocks_of_each = -(-max(num_tokens, _CONTEXT) // _BLOCK_SIZE)
        layout = kv_layout(config, _BLOCK_SIZE, torch.float32)
        self._kv_cache = KVCache(layout, max(_BATCHES) * self._blocks_of_each, _CPU)

    def _chunk(self, number: int, token_ids: Sequence[int], start: int) -> Chunk:
        first = number * self._blocks_of_each
        table = [BlockId(first + i) for i in range(self._blocks_of_each)]
        request = Request(request_id=RequestId(str(number)), prompt_token_ids=list(token_ids), block_table=table)
        return Chunk(request, start, len(token_ids) - start)

    @torch.inference_mode()
    def measure_quality(self, prompts: Sequence[Sequence[int]]) -> dict[Quantization, Quality]:
        found = {way: Quality() for way in _WAYS}
        for token_ids in prompts:
            batch = build_batch([self._chunk(0, token_ids, 0)], _BLOCK_SIZE, self._ropes, _CPU)
            hidden = {way: model.forward(batch, self._kv_cache.data).clone() for way, model in self._models.items()}
            for first in range(0, len(token_ids), _ROWS_AT_ONCE):
                rows = slice(first, first + _ROWS_AT_ONCE)
                expected = self._log_probabilities("none", hidden["none"][rows])
                for way, quality in found.items():
                    own = self._log_probabilities(way, hidden[way][rows])
                    quality.kls += (expected.exp() * (expected - own)).sum(-1).tolist()
                    quality.num_equal += int((expected.argmax(-1) == own.argmax(-1)).sum())
        return found

    @torch.inference_mode()
    def measure_speed(self, num_rounds: int, quiet: Quiet) -> dict[tuple[Quantization, int], list[float]]:
        """Seconds of a decode step, logits included, the ways in turn; the first round does not count."""
        seconds: dict[tuple[Quantization, int], list[float]] = {(way, b): [] for way in _WAYS for b in _BATCHES}
        for round_number in range(num_rounds + 1):
            quiet.look()
            for way, num_seqs in seconds:
                chunks = [self._chunk(number, [7] * _CONTEXT, _CONTEXT - 1) for number in range(num_seqs)]
                batch = build_batch(chunks, _BLOCK_SIZE, self._ropes, _CPU)
                model = self._models[way]
                started_s = time.perf_counter()
                model.logits(model.forward(batch, self._kv_cache.data))
                if round_number > 0:
                    seconds[way, num_seqs].append(time.perf_counter() - started_s)
        return seconds

    def _log_probabilities(self, way: Quantization, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self._models[way].logits(hidden).double(), -1)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2].strip())
    parser.add_argument("--prompts", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each, at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of the speed measurement (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    prompts = [prompt.token_ids[: options.tokens] for prompt in make_prompts(model, options.prompts)]
    lab = WeightLab(model, options.tokens)
    seconds, plain = lab.measure_speed(options.rounds, quiet), lab.measure_quality(prompts)
    with tempfile.TemporaryDirectory() as name:
        noisy = WeightLab(with_noise(model, 0.01, Path(name)), options.tokens).measure_quality(prompts)
    about = machine() | {"threads": str(torch.get_num_threads()), "busy_with_other_things": str(quiet)}
    lines = [
        "# Weights in fewer bytes",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"{model.name}, fp32 arithmetic; in w8a8_int8 and w4a8_int8, activations in 8 bits too. Against fp32,",
        f"over {sum(map(len, prompts)):,} positions of text (that of kv_quality.md): how often the most probable token",
        "is the same, and the mean Kullback-Leibler divergence in nats; then with 1 % of relative noise on weights,",
        "since the built-in ones lie on a grid of 4 bits (8 in the layer that gives logits, which has 8 here as well).",
        f"Decode step: sequences of {_CONTEXT} tokens, medians of {options.rounds} rounds in turns, and the",
        "ratio to fp32 in the same round (below 1 is faster).",
        "",
        "| weights | same token | mean KL | same token, noise | mean KL, noise | step of 1 | of 8 | of 32 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way in _WAYS:
        cells: list[str] = ["fp32" if way == "none" else way]
        for quality in (plain[way], noisy[way]):
            cells += [f"{quality.num_equal / len(quality.kls):.2%}", f"{statistics.fmean(quality.kls):.1e}"]
        for num_seqs in _BATCHES:
            pairs = zip(seconds[way, num_seqs], seconds["none", num_seqs], strict=True)
            ratio = statistics.median(own / of_plain for own, of_plain in pairs)
            cells.append(f"{statistics.median(seconds[way, num_seqs]) * 1e3:.1f} ms, {ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "quantization.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
