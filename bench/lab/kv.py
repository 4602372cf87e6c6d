"""`kvasir bench kv`: each KV connector against the plain transport, moving the same bytes between two processes.

Contenders take turns within every round, so that whatever else the machine does hits all of them. Ours go through
sender and receiver as in a node: header, checksum on both sides, copy into the cache.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

from kvasir.bench.lab.kv_contenders import CASES, SIZES, Case, Mover, Places, local_server
from kvasir.bench.lab.kv_crossover import as_markdown, crossover
from kvasir.bench.lab.kv_report import Quiet, Result, machine, write_results
from kvasir.bench.lab.local_cluster import read_metrics
from kvasir.cli.model import prepare_builtin_model

CROSSOVER = "crossover"
T = TypeVar("T")


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.base_url:
        print("\n".join(overlap_of(options.base_url)))
        return 0
    # Threads that spin while they wait would slow down whoever's turn comes next. Read when torch is imported.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    results: list[Result] = []
    sections: dict[str, list[str]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
        needs_server = {"redis", CROSSOVER} & set(options.cases)
        url = stack.enter_context(local_server(folder)) if needs_server else ""
        places = Places(folder, url, {"nixl": options.nixl_python, "mooncake": options.mooncake_python})
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
    parser = argparse.ArgumentParser(prog="kvasir bench kv", description=(__doc__ or "").partition("\n")[0])
    names = [*CASES, CROSSOVER]
    about = f"{', '.join(names)}; default: all. What is known of others, in the folder, stays"
    parser.add_argument("cases", nargs="*", default=names, metavar="CASE", help=about)
    parser.add_argument("--base-url", default="", help="of a running router: report its transfers' overlap, no more")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each number (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    parser.add_argument("--path", type=Path, help="where files are stored; default: the system's temporary folder")
    parser.add_argument("--nixl-python", default="", help="an interpreter that has nixl: tcp is compared with it too")
    parser.add_argument("--mooncake-python", default="", help="... that has mooncake")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in names]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(names)}")
    return options


def compare(case: Case, size: str, places: Places, num_rounds: int) -> Result:
    """One round more than asked for: the first warms up and does not count."""
    quiet, contenders = Quiet(), case.present(places)
    num_bytes = SIZES[size].num_blocks * SIZES[size].layout.bytes_per_block
    kinds = {contender.name: contender.kind for contender in contenders}
    result = Result(case.name, size, num_bytes, case.target, kinds, {name: [] for name in kinds})
    with ExitStack() as stack:
        movers = [stack.enter_context(closing(Mover(contender, SIZES[size], places))) for contender in contenders]
        for round_number in range(num_rounds + 1):
            quiet.look()
            for mover in rotated(movers, round_number):
                movement = mover.move()
                print(
                    f"{case.name} {size} round {round_number} {mover.name}: {movement.s * 1e3:.1f} ms", file=sys.stderr
                )
                if round_number > 0:
                    result.movements[mover.name].append(movement)
    result.about.update(machine() | {"rounds": num_rounds, "busy_with_other_things": str(quiet)})
    return result


def rotated(turns: Sequence[T], by: int) -> list[T]:
    """Nobody always comes after the same one."""
    start = by % len(turns)
    return [*turns[start:], *turns[:start]]
