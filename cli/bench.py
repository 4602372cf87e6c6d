"""`kvasir bench COMMAND`: benchmarks, each imported when it is asked for."""

import sys
from importlib import import_module

COMMANDS = {
    "serve": ("kvasir.bench.serve", "load on any OpenAI endpoint; latencies and throughput"),
    "latency": ("kvasir.bench.latency", "one request at a time on any OpenAI endpoint; TTFT, ITL, time to the end"),
    "throughput": (
        "kvasir.bench.throughput",
        "all requests at once on any OpenAI endpoint; requests and tokens a second",
    ),
    "check": ("kvasir.bench.check", "is a new service fit to go live? Load, soak, a report of one page"),
    "lab": ("kvasir.bench.lab.serving", "this suite against transformers, on this machine"),
    "kv": ("kvasir.bench.lab.kv", "each KV connector against the plain transport, on this machine"),
    "router": ("kvasir.bench.lab.router", "the router alone, beside the Rust routers of PyPI"),
    "preemption": ("kvasir.bench.lab.preemption", "out of blocks: compute again or keep on the host, by measured cost"),
    "itl": ("kvasir.bench.lab.itl", "prompts beside decoding: the time between two tokens, with and without a target"),
    "step": ("kvasir.bench.lab.step", "a step of the engine on this CPU, beside what no step can be faster than"),
    "start": ("kvasir.bench.lab.start", "how long a node takes from its start to serving, in parts"),
    "peers": ("kvasir.bench.lab.peers", "this engine beside others that are installed here, in turns"),
    "disaggregation": ("kvasir.bench.lab.disaggregation", "two nodes of one core each, or one of two cores"),
    "speculation": (
        "kvasir.bench.lab.speculation",
        "what drafts gain and cost, on a text that repeats and on one that does not",
    ),
    "routing": ("kvasir.bench.lab.routing", "turns of conversations: to the nodes that hold them, or to all by turns"),
    "kernels": ("kvasir.bench.lab.kernels", "each Triton kernel beside what this GPU can do"),
    "quantization": ("kvasir.bench.lab.quantization", "what weights in fewer bytes do to a model's output"),
    "kv-dtype": ("kvasir.bench.lab.kv_dtype", "what each dtype of the KV cache gives and costs"),
    "kv-quality": ("kvasir.bench.lab.kv_quality", "what KV codecs do to a model's output, and how fast they are"),
}


def main(argv: list[str]) -> int:
    command, *rest = argv or ["--help"]
    if command in COMMANDS:
        return run(command, rest)
    usage = "\n".join(
        [
            "usage: kvasir bench COMMAND [OPTIONS]",
            "",
            *(f"  {name:<16}{text}" for name, (_, text) in COMMANDS.items()),
            "",
            "kvasir bench COMMAND --help lists the options of a command.",
        ]
    )
    if command in ("--help", "-h"):
        print(usage)
        return 0
    print(f"kvasir bench: unknown command {command!r}\n\n{usage}", file=sys.stderr)
    return 2


def run(command: str, argv: list[str]) -> int:
    """The exit status. What whoever started it can mend is said in one line: ValueError, OSError."""
    try:
        return int(import_module(COMMANDS[command][0]).main(argv))
    except (ValueError, OSError) as error:
        print(f"kvasir bench {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"kvasir bench {command}: stopped", file=sys.stderr)
        return 130
