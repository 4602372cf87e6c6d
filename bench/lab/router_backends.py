"""Backends that answer at once, for measuring what stands before them: `python -m ... node|echo`.

`node`: decode nodes without an engine. `echo`: an OpenAI server. They print their ports.
"""

import argparse
import asyncio
import gc
import sys
from pathlib import Path

import uvloop

from kvasir.bench.lab.router_clock import Clock
from kvasir.bench.lab.router_echo import serve_echo
from kvasir.bench.lab.router_nodes import serve_nodes


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["node", "echo"])
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--interval-s", type=float, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    options = parser.parse_args(argv)
    clock = Clock(options.stamps, options.interval_s, options.groups)
    work = (
        serve_nodes(clock, options.groups, -(-options.streams // options.groups) + 1)
        if options.kind == "node"
        else serve_echo(clock, options.groups)
    )
    gc.disable()  # its pauses would be taken for the router's
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
