"""`kvasir bench kv-quality`: what each codec does to a model's output, and how fast it is.

Each prompt's KV goes through the codec between prefill and decode, by our own engine and checks. Held against the same
engine that computes it all in one place, in fp32. Written to a folder as a table.
"""

import argparse
import hashlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvasir.bench.lab.kv_quality_engine import CodecLab, Prefilled
from kvasir.bench.lab.kv_quality_speed import Speed, measure_speed
from kvasir.bench.lab.kv_quality_text import Prompt, make_prompts
from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.cli.model import prepare_builtin_model

_NUM_BLOCKS = 1200
_NUM_BLOCKS_TIMED = 128  # 94 MB: more than the processor's caches hold
_QUALITY_OF = ("none", "fp16", "int8", "fp8")
_SPEED_OF = ("lossless", "fp16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one codec. Tokens are greedy and free-running; the rest is teacher-forced on the reference's tokens."""

    num_equal_prompts: int  # of which every token is the reference's
    num_tokens_before_difference: float  # mean over prompts
    equal_tokens: float  # share of positions
    equal_best: float  # share of positions whose most probable token is the reference's
    mean_kl: float  # of the next token's distribution, reference against codec, in nats
    largest_kl: float


def main(argv: list[str]) -> int:
    description = (__doc__ or "").partition("\n")[2].strip()
    parser = argparse.ArgumentParser(prog="kvasir bench kv-quality", description=description)
    parser.add_argument("--prompts", type=int, default=24, help="how many (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of the speed measurement (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    prompts = make_prompts(model, options.prompts)
    lab = CodecLab(model, _NUM_BLOCKS)
    prefilled = lab.prefill([prompt.token_ids for prompt in prompts])
    reference = lab.generate_here([prompt.token_ids for prompt in prompts], options.tokens)
    qualities = measure_quality(lab, prefilled, reference)
    blocks = [block for one in prefilled for block in one.blocks][:_NUM_BLOCKS_TIMED]
    speeds = measure_speed(blocks, lab.layout, _SPEED_OF, options.rounds, quiet)
    about = machine() | {"busy_with_other_things": str(quiet)}
    lines = ["# What the KV codecs do to the output, and how fast they are", ""]
    lines += [", ".join(f"{key} {value}" for key, value in about.items()), ""]
    lines += quality_table(f"{model.name} in fp32", prompts, options.tokens, qualities)
    lines += speed_table(lab.layout.bytes_per_block, speeds)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kv_quality.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


def measure_quality(
    lab: CodecLab, prefilled: Sequence[Prefilled], reference: Sequence[Sequence[int]]
) -> dict[str, Quality]:
    """reference: the tokens of each prompt, computed without any transfer"""
    generated = {codec: lab.generate_from(prefilled, codec, len(reference[0])) for codec in _QUALITY_OF}
    kls: dict[str, list[float]] = {codec: [] for codec in _QUALITY_OF}
    num_equal_best = dict.fromkeys(_QUALITY_OF, 0)
    for one, tokens in zip(prefilled, reference, strict=True):
        expected = torch.log_softmax(lab.next_token_logits(one, "none", tokens[:-1]).double(), -1)
        for codec in _QUALITY_OF:
            found = torch.log_softmax(lab.next_token_logits(one, codec, tokens[:-1]).double(), -1)
            kls[codec] += (expected.exp() * (expected - found)).sum(-1).tolist()
            num_equal_best[codec] += int((expected.argmax(-1) == found.argmax(-1)).sum())
    qualities = {}
    for codec in _QUALITY_OF:
        pairs = list(zip(reference, generated[codec], strict=True))
        qualities[codec] = Quality(
            num_equal_prompts=sum(a == b for a, b in pairs),
            num_tokens_before_difference=statistics.fmean(num_equal(a, b) for a, b in pairs),
            equal_tokens=statistics.fmean(x == y for a, b in pairs for x, y in zip(a, b, strict=True)),
            equal_best=num_equal_best[codec] / len(kls[codec]),
            mean_kl=statistics.fmean(kls[codec]),
            largest_kl=max(kls[codec]),
        )
    return qualities


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def quality_table(
    model: str, prompts: Sequence[Prompt], num_tokens: int, qualities: Mapping[str, Quality]
) -> list[str]:
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    digest = hashlib.sha256(repr([prompt.token_ids for prompt in prompts]).encode()).hexdigest()[:12]
    median = lengths[len(lengths) // 2]
    lines = [
        f"{model}. {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens (median {median}),",
        f"{sum(prompt.is_chat for prompt in prompts)} of them chats, from:",
        f"{', '.join(dict.fromkeys(prompt.source for prompt in prompts))}; sha256 of the token ids {digest}.",
        f"{num_tokens} greedy tokens each, no stop token. The reference computes prompt and answer in one engine, and",
        "nothing travels; for each codec the prompt's blocks go from prefill to decode through it, and the answers are",
        "compared token by token. KL (nats) and the best token are those of the next token's distribution, at each",
        "position after the first, on the reference's tokens. `lossless` gives the bytes of `none`.",
        "",
        "| codec | prompts all equal | tokens before the first difference | tokens equal | best token equal "
        "| mean KL | largest KL |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for codec, quality in qualities.items():
        cells = [
            codec,
            f"{quality.num_equal_prompts} of {len(prompts)}",
            f"{quality.num_tokens_before_difference:.1f} of {num_tokens}",
            f"{quality.equal_tokens:.1%}",
            f"{quality.equal_best:.2%}",
            f"{quality.mean_kl:.1e}",
            f"{quality.largest_kl:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def speed_table(bytes_per_block: int, speeds: Mapping[str, Speed]) -> list[str]:
    lines = [
        f"Speed on these blocks ({bytes_per_block:,} bytes), one thread, in bytes of the block; beside it the ratio to",
        "copying the block in the same rounds. The last column: on a link slower than this the codec saves time even",
        "where encode, send and decode come one after the other. `none` hands the block on without a copy.",
        "",
        "| codec | size | encode GB/s | to a copy | decode GB/s | to a copy | pays below Gbit/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for codec, speed in speeds.items():
        cells = [
            codec,
            f"{speed.size:.1%}",
            f"{speed.encode_bytes_per_s / 1e9:.2f}",
            f"{speed.encode_ratio:.2f}",
            f"{speed.decode_bytes_per_s / 1e9:.2f}",
            f"{speed.decode_ratio:.2f}",
            f"{speed.pays_below_bits_per_s / 1e9:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
