"""`kvasir bench start`: how long a node with the built-in model takes from its start to serving, in parts.

Each kind of node is started again and again, with compiled loops in the cache; and once, if asked to, without any.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvasir.bench.command_line import positive
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.rounds import in_turns
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model

# What a node says when a part of its start is over.
MARKS = {"imports": "loading ", "model": "KV cache of ", "servers": " node serves on "}
KINDS: dict[str, list[str]] = {
    "prefill": ["prefill"],
    "decode": ["decode"],
    "decode-fp16": ["decode", "--quantization", "fp16"],
    "decode-int8": ["decode", "--quantization", "int8"],
    "decode-int4": ["decode", "--quantization", "int4"],
}
_LONGEST_S = 110.0


def start_node(model: Path, kind: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of each part. RuntimeError with the last lines of its log: it ended, or took too long.

    kind: the role, and options
    """
    role, *options = kind
    command = [sys.executable, "-m", f"kvasir.{role}_node", "--model", str(model), "--listen", "127.0.0.1:0"]
    command += ["--metrics-port", "0", *options]
    started_s = time.perf_counter()
    parts_s: dict[str, float] = {}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment}
    ) as node:
        deadline = threading.Timer(_LONGEST_S, node.kill)
        deadline.start()
        try:
            assert node.stdout is not None
            for line in node.stdout:
                lines.append(line)
                for part, mark in MARKS.items():
                    if mark in line and part not in parts_s:
                        parts_s[part] = time.perf_counter() - started_s - sum(parts_s.values())
                if len(parts_s) == len(MARKS):
                    return parts_s
        finally:
            deadline.cancel()
            node.terminate()
    raise RuntimeError(f"the {role} node did not come to serve:\n{''.join(lines[-5:])}")


def main(argv: list[str]) -> int:
    parser = lab_parser("start", __doc__)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="(default: the built-in model)")
    add("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND", help="of " + ", ".join(KINDS))
    add("--rounds", type=positive(int), default=3, help="starts of each kind; one more comes first and does not count")
    add("--cold", action="store_true", help="also once with nothing compiled yet")
    options = parser.parse_args(argv)
    model, quiet = options.model or prepare_builtin_model(), Quiet()
    works = {kind: partial(start_node, model, KINDS[kind], os.environ) for kind in options.kinds}
    starts = in_turns(works, options.rounds, quiet, lambda kind, parts_s: f"{kind}: {sum(parts_s.values()):.2f} s")
    if options.cold:
        with tempfile.TemporaryDirectory() as empty:
            kind = options.kinds[0]
            cold = start_node(model, KINDS[kind], os.environ | {"NUMBA_CACHE_DIR": empty})
            starts[f"{kind}, nothing compiled"] = [cold]
    write_page(options.output, "start.md", as_markdown(quiet.about_machine(), starts))
    return 0


def as_markdown(about: Mapping[str, object], starts: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = [
        "Seconds from the start of a node's process, with the files in memory; medians. Imports: until it begins to",
        "load. Model: weights read and packed, the KV cache's memory touched, loops loaded from their cache, a first",
        "step of each kind. Servers: until it serves.",
        "",
    ]
    cells = []
    for kind, own in starts.items():
        parts_s = [statistics.median(start[part] for start in own) for part in MARKS]
        whole_s = statistics.median(sum(start.values()) for start in own)
        cells.append([kind, str(len(own)), *(f"{s:.2f}" for s in [*parts_s, whole_s])])
    header = f"node | starts | {' | '.join(MARKS)} | all"
    return as_page("From start to serving", about, [*lines, *table(header, cells)])
