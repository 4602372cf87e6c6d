"""`kvasir bench COMMAND`: benchmarks, each imported when it is asked for."""

import sys
from importlib import import_module

COMMANDS = {
    "serve": ("kvasir.bench.serve", "load on any OpenAI endpoint; latencies and throughput"),
    "lab": ("kvasir.bench.lab.serving", "this suite against transformers, on this machine"),
    "kv": ("kvasir.bench.lab.kv", "each KV connector against the plain transport, on this machine"),
    "router": ("kvasir.bench.lab.router", "the router alone, beside the Rust routers of PyPI"),
    "preemption": ("kvasir.bench.lab.preemption", "out of blocks: compute again or keep on the host, by measured cost"),
    "itl": ("kvasir.bench.lab.itl", "prompts beside decoding: the time between two tokens, with and without a target"),
    "kernels": ("kvasir.bench.lab.kernels", "each Triton kernel beside what this GPU can do"),
    "kv-quality": ("kvasir.bench.lab.kv_quality", "what KV codecs do to a model's output, and how fast they are"),
}


def main(argv: list[str]) -> int:
    command, *rest = argv or ["--help"]
    if command in COMMANDS:
        return int(import_module(COMMANDS[command][0]).main(rest))
    wanted_help = command in ("--help", "-h")
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    usage = "\n".join(["usage: kvasir bench COMMAND [OPTIONS]", "", *lines])
    if wanted_help:
        print(usage)
        return 0
    print(f"kvasir bench: unknown command {command!r}\n\n{usage}", file=sys.stderr)
    return 2
