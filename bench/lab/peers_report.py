"""What was found of each peer, and how far its greedy answers are those of transformers."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFERENCE = "transformers"


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One turn of one peer. Agreement None: it does not say its tokens, or there is nothing to compare them with."""

    peer: str
    round: int
    concurrency: int
    tokens_per_s: float  # from the prompts to the last token
    decode_tokens_per_s: float | None  # what is longer than until the first tokens
    num_equal: int | None = None  # answers that are the reference's in every token
    num_compared: int = 0

    def compare(self, answers: Mapping[str, Sequence[Any]]) -> None:
        own, reference = answers.get(self.peer), answers.get(REFERENCE)
        if own and reference and len(own) == len(reference):
            self.num_compared = len(own)
            self.num_equal = sum(one == other for one, other in zip(own, reference, strict=True))

    def line(self) -> str:
        return f"round {self.round}  {self.peer}, {self.concurrency} at once: {self.tokens_per_s:.1f} tokens/s"


def as_markdown(about: Mapping[str, Any], input_len: int, output_len: int, measurements: Sequence[Measurement]) -> str:
    peers = list(dict.fromkeys(one.peer for one in measurements))
    counts = sorted({one.concurrency for one in measurements})
    num_rounds = min(Counter((one.peer, one.concurrency) for one in measurements).values(), default=0)
    lines = [
        "# Beside other engines",
        "",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "",
        f"The built-in model, {input_len} tokens in and {output_len} out, greedy, no prefix cache; each in a",
        f"process of its own on all cores, in turns. Medians of {num_rounds} round(s), tokens per second. Decoding is",
        "what the whole answer takes longer than the first tokens. Agreement: answers that are those of transformers",
        "(fp32) in every token.",
        "",
    ]
    for title, name in (("Decoding", "decode_tokens_per_s"), ("From the prompts to the end", "tokens_per_s")):
        lines += [f"| {title} | " + " | ".join(f"{count} at once" for count in counts) + " | agreement |"]
        lines += ["|---|" + "---:|" * (len(counts) + 1)]
        for peer in peers:
            own = [one for one in measurements if one.peer == peer]
            cells = [_median([getattr(one, name) for one in own if one.concurrency == count]) for count in counts]
            lines.append(f"| {peer} | " + " | ".join([*cells, _agreement(own)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "-"


def _agreement(measurements: Sequence[Measurement]) -> str:
    compared = [one for one in measurements if one.num_equal is not None]
    if not compared:
        return "-"
    return f"{sum(one.num_equal or 0 for one in compared)} of {sum(one.num_compared for one in compared)}"
