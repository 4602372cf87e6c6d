"""What was found of each peer, and how far its greedy answers are those of transformers."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.bench.lab.page import as_page
from kvasir.bench.markdown import table

REFERENCE = "transformers"
_OURS = "kvasir-"


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

    def compare(self, answers: Sequence[object], reference: Sequence[object]) -> None:
        if answers and len(answers) == len(reference):
            self.num_compared = len(answers)
            self.num_equal = sum(one == other for one, other in zip(answers, reference, strict=True))

    def line(self) -> str:
        return f"round {self.round}  {self.peer}, {self.concurrency} at once: {self.tokens_per_s:.1f} tokens/s"


def as_markdown(about: Mapping[str, Any], input_len: int, output_len: int, measurements: Sequence[Measurement]) -> str:
    peers = list(dict.fromkeys(one.peer for one in measurements))
    counts = sorted({one.concurrency for one in measurements})
    rounds = Counter((one.peer, one.concurrency) for one in measurements).values()
    num_rounds = f"{min(rounds, default=0)} to {max(rounds, default=0)}"
    lines = [
        f"The built-in model, {input_len} tokens in and {output_len} out, greedy, no prefix cache; each in a",
        f"process of its own on all cores, in turns. Medians of {num_rounds} rounds, tokens per second. Decoding is",
        "what the whole answer takes longer than the first tokens. Agreement: answers that are those of transformers",
        "(fp32) in every token.",
        "",
    ]
    at_once = " | ".join(f"{count} at once" for count in counts)
    for title, name in (("Decoding", "decode_tokens_per_s"), ("From the prompts to the end", "tokens_per_s")):
        rows = []
        for peer in peers:
            own = [one for one in measurements if one.peer == peer]
            cells = [_median([getattr(one, name) for one in own if one.concurrency == count]) for count in counts]
            rows.append([peer, *cells, _agreement(own)])
        lines += [*table(f"{title} | {at_once} | agreement", rows), ""]
    return as_page("Beside other engines", about, [*lines, *_ratios(measurements, counts)])


def _ratios(measurements: Sequence[Measurement], counts: Sequence[int]) -> list[str]:
    """Each of ours beside the fastest of those whose answers agree no less than its own."""
    rates: dict[tuple[str, int], float] = {}
    for peer, count in {(one.peer, one.concurrency) for one in measurements}:
        own = [one for one in measurements if (one.peer, one.concurrency) == (peer, count)]
        known = [one.decode_tokens_per_s for one in own if one.decode_tokens_per_s is not None]
        if known:
            rates[peer, count] = statistics.median(known)
    agreements = {peer: _share_of_equal([one for one in measurements if one.peer == peer]) for peer, _ in rates}
    ours = list(dict.fromkeys(one.peer for one in measurements if one.peer.startswith(_OURS)))
    rows = []
    for name in ours:
        cells = []
        for count in counts:
            others = [
                (rate, peer)
                for (peer, at), rate in rates.items()
                if at == count and not peer.startswith(_OURS) and agreements[peer] >= agreements[name]
            ]
            rate, best = max(others, default=(0.0, ""))
            mine = rates.get((name, count))
            cells.append(f"{mine / rate:.2f} ({best})" if mine and best else "-")
        rows.append([name, *cells])
    at_once = " | ".join(f"{count} at once" for count in counts)
    return [
        "Ours beside the fastest peer whose answers agree no less (decoding; above 1 is faster):",
        "",
        *table(f" | {at_once}", rows),
    ]


def _share_of_equal(measurements: Sequence[Measurement]) -> float:
    """Of the answers compared; of none: 0, for nothing is known of them."""
    num_compared = sum(one.num_compared for one in measurements)
    return sum(one.num_equal or 0 for one in measurements) / num_compared if num_compared else 0.0


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "-"


def _agreement(measurements: Sequence[Measurement]) -> str:
    compared = [one for one in measurements if one.num_equal is not None]
    if not compared:
        return "-"
    return f"{sum(one.num_equal or 0 for one in compared)} of {sum(one.num_compared for one in compared)}"
