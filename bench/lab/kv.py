"""`kvasir bench kv`: each KV connector against the plain transport, moving the same bytes between two processes.

Contenders take turns within every round, so that whatever else the machine does hits all of them. Ours go through
sender and receiver as in a node: header, checksum on both sides, copy into the cache.
"""

import argparse
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from kvasir.bench.command_line import positive
from kvasir.bench.lab.kv_cases import CASES, PEERS, SIZES, Case, Places
from kvasir.bench.lab.kv_crossover import as_markdown, crossover
from kvasir.bench.lab.kv_mover import Mover, local_server
from kvasir.bench.lab.kv_report import Result, write_results
from kvasir.bench.lab.local_cluster import read_metrics
from kvasir.bench.lab.machine import Quiet, let_threads_sleep
from kvasir.bench.lab.page import lab_parser
from kvasir.bench.lab.rounds import in_turns
from kvasir.cli.builtin_model import prepare_builtin_model

CROSSOVER = "crossover"


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.base_url:
        print("\n".join(overlap_of(options.base_url)))
        return 0
    let_threads_sleep()
    results: list[Result] = []
    sections: dict[str, list[str]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
        needs_server = {"redis", CROSSOVER} & set(options.cases)
        url = stack.enter_context(local_server(folder)) if needs_server else ""
        places = Places(folder, url, {name: getattr(options, f"{name}_python") for name in PEERS})
        for name in options.cases:
            if name == CROSSOVER:
                rows = crossover(prepare_builtin_model(), places, max(1, options.rounds // 3))
                sections[name] = as_markdown(rows)
            else:
                results += [compare(CASES[name], size, places, options.rounds) for size in options.sizes]
    write_results(options.output, results, sections)
    return 0


def overlap_of(base_url: str) -> list[str]:
    """What a running router has counted: how much of its transfers went on beside the prefill."""
    counted = read_metrics(base_url.rstrip("/").removesuffix("/v1") + "/metrics")
    num_blocks, num_bytes, fetching_s, beside_s = (
        counted.get(f"kvasir:dispatch_kv_{what}_total", 0.0)
        for what in ("blocks", "bytes", "seconds", "overlapped_seconds")
    )
    if not fetching_s:
        return ["No KV has been moved yet."]
    return [
        f"KV blocks moved          {num_blocks:.0f}",
        f"  bytes                  {num_bytes / 1e6:.1f} MB",
        f"  time                   {fetching_s:.3f} s, at {num_bytes / fetching_s / 1e6:.0f} MB/s",
        f"  of it beside prefill   {beside_s:.3f} s, {beside_s / fetching_s:.0%}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    names = [*CASES, CROSSOVER]
    parser = lab_parser("kv", __doc__, "[CASE ...]")
    add = parser.add_argument
    add("cases", nargs="*", default=names, metavar="CASE",
        help=f"{', '.join(names)} (default: all); what is known of others, in the folder, stays")  # fmt: skip
    add("--base-url", default="", metavar="URL", help="of a running router: report its transfers' overlap, no more")
    sizes = list(SIZES)
    add("--sizes", nargs="+", default=sizes, choices=sizes, metavar="SIZE", help=f"of a block: {' or '.join(sizes)} "
        "(default: both)")  # fmt: skip
    add("--rounds", type=positive(int), default=10, help="measurements of each number")
    add("--path", type=Path, metavar="DIR", help="where files are stored (default: the system's temporary folder)")
    for name in PEERS:
        add(f"--{name}-python", metavar="PATH", help=f"an interpreter that has {name}, for tcp to be compared with")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(names):
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(names)}")
    return options


def compare(case: Case, size: str, places: Places, num_rounds: int) -> Result:
    quiet, contenders = Quiet(), case.present(places)
    num_bytes = SIZES[size].num_blocks * SIZES[size].layout.bytes_per_block
    kinds = {contender.name: contender.kind for contender in contenders}
    with ExitStack() as stack:
        moves = {
            contender.name: stack.enter_context(closing(Mover(contender, SIZES[size], places))).move
            for contender in contenders
        }
        movements = in_turns(
            moves, num_rounds, quiet, lambda name, one: f"{case.name}, {size}, {name}: {one.s * 1e3:.1f} ms"
        )
    about = quiet.about_machine(rounds=num_rounds)
    return Result(case.name, size, num_bytes, case.target, kinds, movements, about)
