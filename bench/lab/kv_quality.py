"""`kvasir bench kv-quality`: what each codec does to a model's output, and how fast it is.

Each prompt's KV goes through the codec between prefill and decode, by our own engine and checks. Held against the same
engine that computes it all in one place, in fp32.
"""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir.bench.command_line import positive
from kvasir.bench.lab.divergence import Divergence, log_probabilities
from kvasir.bench.lab.kv_quality_engine import CodecLab, Prefilled
from kvasir.bench.lab.kv_quality_speed import Speed, measure_speed
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.passages import Prompt, make_prompts
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model

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
    divergence: Divergence


def main(argv: list[str]) -> int:
    parser = lab_parser("kv-quality", __doc__)
    add = parser.add_argument
    add("--prompts", type=positive(int), default=24, help="how many texts")
    add("--tokens", type=positive(int), default=64, help="generated for each")
    add("--rounds", type=positive(int), default=20, help="of the speed measurement")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    prompts = make_prompts(model, options.prompts)
    lab = CodecLab(model, _NUM_BLOCKS)
    prefilled = lab.prefill([prompt.token_ids for prompt in prompts])
    reference = lab.generate_here([prompt.token_ids for prompt in prompts], options.tokens)
    qualities = measure_quality(lab, prefilled, reference)
    blocks = [block for one in prefilled for block in one.blocks][:_NUM_BLOCKS_TIMED]
    speeds = measure_speed(blocks, lab.layout, _SPEED_OF, options.rounds, quiet)
    lines = quality_table(f"{model.name} in fp32", prompts, options.tokens, qualities)
    lines += ["", *speed_table(lab.layout.bytes_per_block, speeds)]
    title = "What the KV codecs do to the output, and how fast they are"
    write_page(options.output, "kv_quality.md", as_page(title, quiet.about_machine(), lines))
    return 0


def measure_quality(
    lab: CodecLab, prefilled: Sequence[Prefilled], reference: Sequence[Sequence[int]]
) -> dict[str, Quality]:
    """reference: the tokens of each prompt, computed without any transfer"""
    generated = {codec: lab.generate_from(prefilled, codec, len(reference[0])) for codec in _QUALITY_OF}
    divergences = {codec: Divergence() for codec in _QUALITY_OF}
    for one, tokens in zip(prefilled, reference, strict=True):
        expected = log_probabilities(lab.next_token_logits(one, "none", tokens[:-1]))
        for codec, divergence in divergences.items():
            divergence.add(expected, log_probabilities(lab.next_token_logits(one, codec, tokens[:-1])))
    qualities = {}
    for codec in _QUALITY_OF:
        pairs = list(zip(reference, generated[codec], strict=True))
        qualities[codec] = Quality(
            num_equal_prompts=sum(a == b for a, b in pairs),
            num_tokens_before_difference=statistics.fmean(num_equal(a, b) for a, b in pairs),
            equal_tokens=statistics.fmean(x == y for a, b in pairs for x, y in zip(a, b, strict=True)),
            divergence=divergences[codec],
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
    ]
    rows = []
    for codec, quality in qualities.items():
        row = [
            codec,
            f"{quality.num_equal_prompts} of {len(prompts)}",
            f"{quality.num_tokens_before_difference:.1f} of {num_tokens}",
            f"{quality.equal_tokens:.1%}",
            f"{quality.divergence.equal_best:.2%}",
            f"{quality.divergence.mean_kl:.1e}",
            f"{quality.divergence.largest_kl:.1e}",
        ]
        rows.append(row)
    header = "codec | prompts all equal | tokens before the first difference | tokens equal | best token equal | "
    return [*lines, *table(header + "mean KL | largest KL", rows)]


def speed_table(bytes_per_block: int, speeds: Mapping[str, Speed]) -> list[str]:
    lines = [
        f"Speed on these blocks ({bytes_per_block:,} bytes), one thread, in bytes of the block; beside it the ratio to",
        "copying the block in the same rounds. The last column: on a link slower than this the codec saves time even",
        "where encode, send and decode come one after the other. `none` hands the block on without a copy.",
        "",
    ]
    rows = []
    for codec, speed in speeds.items():
        row = [
            codec,
            f"{speed.size:.1%}",
            f"{speed.encode_bytes_per_s / 1e9:.2f}",
            f"{speed.encode_ratio:.2f}",
            f"{speed.decode_bytes_per_s / 1e9:.2f}",
            f"{speed.decode_ratio:.2f}",
            f"{speed.pays_below_bits_per_s / 1e9:.1f}",
        ]
        rows.append(row)
    header = "codec | size | encode GB/s | to a copy | decode GB/s | to a copy | pays below Gbit/s"
    return [*lines, *table(header, rows)]
