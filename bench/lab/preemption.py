"""`kvasir bench preemption`: out of blocks, compute again or keep on the host? By length, by bandwidth, under pressure.

Our own engine with the built-in model, in this process. A slow way to the host is a copy that takes as long as it
would.
"""

from collections.abc import Sequence

from kvasir.bench.command_line import positive
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.preemption_engine import BLOCK_SIZE, NUM_BLOCKS_PRESSED, RULES, PreemptionLab, Run
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.engine.preemption import Loss, Rates, choose_way

_LENGTHS = (64, 256, 512, 1024, 2000)
_BANDWIDTHS = (None, 200e6, 50e6, 20e6, 8e6)  # bytes/s; None: what copying takes
_PRESSED = (None, 100e6, 20e6)

# By bandwidth and rule: one a round
Runs = dict[tuple[float | None, str], list[Run]]


def main(argv: list[str]) -> int:
    parser = lab_parser("preemption", __doc__)
    add = parser.add_argument
    add("--requests", type=positive(int), default=12, help="at once, under pressure")
    add("--tokens", type=positive(int), default=112, help="generated for each")
    add("--rounds", type=positive(int), default=1, help="of which the best counts")
    options = parser.parse_args(argv)
    quiet, lab = Quiet(), PreemptionLab(prepare_builtin_model())
    lab.compute_s(300)  # whatever is done once is done
    lengths = by_length(lab, 1 + options.rounds)
    runs = under_pressure(lab, quiet, options.rounds, options.requests, options.tokens)
    lines = [
        f"smollm2-135m-instruct in fp32; a block of {BLOCK_SIZE} tokens has {lab.kv_cache.layout.bytes_per_block:,} "
        "bytes. What the cost",
        "function chooses for a context of which nothing is cached, from the rates of this run. The cells are the time",
        "of both copies; 'thought to be' is the line that the engine has put through its own steps.",
        "",
        *lengths,
        "",
        f"Under pressure: {options.requests} requests at once, prompts of 64 to 192 tokens, {options.tokens} generated",
        f"for each, {NUM_BLOCKS_PRESSED} blocks. Seconds until the last token; in the last two columns, choosing as a",
        "share of either.",
        "",
        *pressed_table(runs),
    ]
    title = "Out of blocks: compute again, or keep on the host?"
    write_page(options.output, "preemption.md", as_page(title, quiet.about_machine(), lines))
    return 0


def by_length(lab: PreemptionLab, num_rounds: int) -> list[str]:
    """What the cost function says, on what was measured a moment ago."""
    computed_s: dict[int, float] = {}
    for _ in range(num_rounds):
        for length in _LENGTHS:
            computed_s[length] = min(computed_s.get(length, 1e9), lab.compute_s(length))
    copies_s = {bandwidth: lab.copy_s_per_block(bandwidth) for bandwidth in _BANDWIDTHS}
    speed, block_bytes = lab.prefill_speed(), lab.kv_cache.layout.bytes_per_block
    rows = []
    for length in _LENGTHS:
        num_blocks = -(-length // BLOCK_SIZE)
        loss = Loss(
            num_tokens=length, num_kept_tokens=0, num_stored_tokens=0,
            num_own_blocks=num_blocks, num_freed_blocks=num_blocks, block_size=BLOCK_SIZE,
        )  # fmt: skip
        cells = [str(length), f"{computed_s[length]:.3f} s", f"{speed.seconds(0, length):.3f} s"]
        for copy_s in copies_s.values():
            way = choose_way(loss, Rates(prefill=speed, copy_s_per_block=copy_s), num_blocks).way
            cells.append(f"{2 * num_blocks * copy_s:.3f} s: {way.value}")
        rows.append([*cells, f"{2 * num_blocks * block_bytes / computed_s[length] / 1e6:.0f} MB/s"])
    slower = " | ".join(map(_name, _BANDWIDTHS[1:]))
    header = f"context | computed again | thought to be | copied both ways | {slower} | computing wins below"
    return table(header, rows, num_texts=0)


def under_pressure(lab: PreemptionLab, quiet: Quiet, num_rounds: int, num_requests: int, num_tokens: int) -> Runs:
    runs: Runs = {}
    for _ in range(num_rounds):
        for bandwidth in _PRESSED:
            quiet.look()
            for rule in RULES:
                run = lab.under_pressure(rule, bandwidth, num_requests, num_tokens)
                runs.setdefault((bandwidth, rule), []).append(run)
    return runs


def pressed_table(runs: Runs) -> list[str]:
    """Of the best runs."""
    best = {key: min(own, key=lambda run: run.seconds) for key, own in runs.items()}
    bandwidths = list(dict.fromkeys(bandwidth for bandwidth, _ in best))
    rows = []
    for bandwidth in bandwidths:
        chosen = best[bandwidth, "choosing"]
        seconds = [best[bandwidth, rule].seconds for rule in RULES]
        rows.append(_row(_name(bandwidth), seconds, f"{chosen.num_preemptions} ({chosen.num_swaps})"))
    totals = [sum(best[bandwidth, rule].seconds for bandwidth in bandwidths) for rule in RULES]
    header = f"way to the host | {' | '.join(RULES)} | preempted (swapped) | to recompute | to swap"
    alike = [best[bandwidth, "recompute"].seconds for bandwidth in bandwidths]
    return [
        *table(header, [*rows, _row("all of them", totals, "")]),
        "",
        "Computing again has nothing to do with the way to the host: its times differ by chance, here by",
        f"{max(alike) / min(alike) - 1:.1%}. A choice that differs from the better of both by less says nothing.",
    ]


def _row(name: str, seconds: Sequence[float], counts: str) -> list[str]:
    """seconds: by rule, in their order"""
    recompute, swap, choosing = seconds
    ratios = (f"{choosing / other:.2f}" for other in (recompute, swap))
    return [name, *(f"{one:.2f} s" for one in seconds), counts, *ratios]


def _name(bandwidth: float | None) -> str:
    return "a copy in memory" if bandwidth is None else f"{bandwidth / 1e6:.0f} MB/s"
