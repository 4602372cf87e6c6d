"""`kvasir bench kv`: each KV connector against the plain transport, moving the same bytes between two processes.

Contenders take turns within every round, so that whatever else the machine does hits all of them. Ours go through
sender and receiver as in a node: header, checksum on both sides, copy into the cache.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from kvasir.bench.lab.kv_contenders import CASES, SIZES, Case, Mover, Places, local_server
from kvasir.bench.lab.kv_report import Quiet, Result, write_results


def main(argv: list[str]) -> int:
    options = parse(argv)
    quiet = Quiet()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
        url = stack.enter_context(local_server(folder)) if "redis" in options.cases else ""
        places = Places(folder, url, {"nixl": options.nixl_python, "mooncake": options.mooncake_python})
        results = [
            compare(CASES[name], size, places, options.rounds, quiet)
            for name in options.cases
            for size in options.sizes
        ]
    write_results(options.output, results, quiet, options.rounds, [])
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvasir bench kv", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each number (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    parser.add_argument("--path", type=Path, help="where files are stored; default: the system's temporary folder")
    parser.add_argument("--nixl-python", default="", help="an interpreter that has nixl: tcp is compared with it too")
    parser.add_argument("--mooncake-python", default="", help="... that has mooncake")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    return options


def compare(case: Case, size: str, places: Places, num_rounds: int, quiet: Quiet) -> Result:
    """One round more than asked for: the first warms up and does not count."""
    contenders = case.present(places)
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
    return result


def rotated(movers: Sequence[Mover], by: int) -> list[Mover]:
    """Nobody always comes after the same one."""
    start = by % len(movers)
    return [*movers[start:], *movers[:start]]
