"""`kvasir bench router`: the router alone, before nodes that answer at once; beside the Rust routers of PyPI.

Each contender is one router process (with `--workers 2`: three) before a backend process, and reads the same requests
from the same 512 streams. `sglang-router` and `vllm-router` are taken from the environment of `--peer-python`, and
stand before a server that streams OpenAI's events at once; ours stands before nodes that speak its sessions. Two
measurements, contenders taking turns:

- flat out: backends have 200 tokens a second for each stream, which is more than anything here passes on. Tokens per
  second of the router's CPU time (all its threads), which is what one core can do.
- paced: all backends at one rate, their groups of streams in turn, at even distances. From a token's making to its
  arrival at the client. Half load of ours is half of the most that it passes on with an event for each token: the
  highest rate of these whose `tokens_per_event` is 1.

A backend that cannot write waits, as ours do: our nodes then give several tokens at once, and the other server leaves
a tick out. Our router, when it cannot keep up, sends several tokens in one event; `tokens_per_event` says how many.

With `--router-cpu` the router has that CPU for itself, and backends and client share the others: then delays are the
router's, and not of a client that waits for a CPU.
"""

import asyncio
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from kvasir.bench.command_line import positive, several
from kvasir.bench.lab.machine import about_machine, busy_share_since, cpu_times_s, process_cpu_s
from kvasir.bench.lab.page import lab_parser
from kvasir.bench.lab.router_contenders import DIRECT, OURS, OURS_TWICE, PEERS, Setting, prepare, running
from kvasir.bench.lab.router_load import Streams
from kvasir.bench.lab.router_report import Result, read_results, write_results
from kvasir.bench.timeline import percentile

_WARM_UP_S = 3.0
_FLAT_OUT_INTERVAL_S = 0.005  # 200 tokens a second in each stream: more than anything here passes on


def main(argv: list[str]) -> int:
    parser = lab_parser("router", __doc__)
    add = parser.add_argument
    add("--streams", type=positive(int), default=512, help="answers at once")
    add("--tokens", type=positive(int), default=256, help="of an answer, on average")
    add("--nodes", type=positive(int), default=16, help="that the streams are spread over")
    add("--rounds", type=positive(int), default=3, help="all contenders once in each")
    add("--duration-s", type=positive(float), default=5.0, help="seconds of one measurement")
    add("--peer-python", metavar="PATH", help="python of an environment with sglang-router and vllm-router")
    add("--only", metavar="NAME,..", help="contenders, separated by commas (default: all there are)")
    add("--rates", type=several(_rate), default=("flat",), metavar="X,..", help="tokens/s in all, or `flat` (out)")
    add("--router-cpu", type=int, metavar="N", help="number of the CPU that the router has for itself (default: none)")
    add("--add", action="store_true", help="rounds to those that the output has: measure piece by piece")
    options = parser.parse_args(argv)
    contenders = [OURS, OURS_TWICE, *(PEERS if options.peer_python else ()), DIRECT]
    if unknown := set((options.only or "").split(",")) - {"", *contenders}:
        parser.error(f"--only: unknown {', '.join(unknown)}; choose from {', '.join(contenders)}")
    if options.only:
        contenders = options.only.split(",")
    if options.router_cpu is not None:
        cpus = os.sched_getaffinity(0)
        if len(cpus) < 2 or options.router_cpu not in cpus:
            parser.error(f"--router-cpu: must be one of several; there are {sorted(cpus)}")
        os.sched_setaffinity(0, cpus - {options.router_cpu})  # backends inherit it
    sections = read_results(options.output) if options.add else {}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            num_streams=options.streams,
            num_tokens=options.tokens,
            num_groups=options.nodes,
            duration_s=options.duration_s,
            folder=Path(folder),
            peer_python=options.peer_python,
            router_cpu=options.router_cpu,
        )
        prepare(setting)
        for rate in options.rates:
            section = "Flat out" if rate == "flat" else f"Paced, {rate} tokens/s in all"
            section += "" if options.router_cpu is None else ", router on a CPU of its own"
            interval_s = _FLAT_OUT_INTERVAL_S if rate == "flat" else options.streams / float(rate)
            sections.setdefault(section, []).extend(compare(contenders, setting, options.rounds, interval_s))
    about = about_machine() | {name: getattr(options, name) for name in ("streams", "tokens", "nodes", "duration_s")}
    explanation = (__doc__ or "").strip().partition("\n\n")[2]
    write_results(options.output, about, explanation, sections)
    return 0


def _rate(text: str) -> str:
    if text != "flat":
        positive(float)(text)  # as it is written, it is in the heading
    return text


def compare(contenders: Sequence[str], setting: Setting, num_rounds: int, interval_s: float) -> list[Result]:
    results = []
    for _ in range(num_rounds):
        for contender in contenders:
            results.append(measure(contender, setting, interval_s))
            print(results[-1], file=sys.stderr)
    return results


def measure(contender: str, setting: Setting, interval_s: float) -> Result:
    gc.collect()
    gc.disable()  # its pauses would be taken for the router's
    with (
        running(contender, setting, interval_s) as (port, pid),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as r,
    ):
        return r.run(_measure(contender, setting, port, pid))


async def _measure(contender: str, setting: Setting, port: int, pid: int) -> Result:
    async with Streams(port, setting.num_streams, setting.num_tokens, setting.stamps) as streams:
        await streams.watch(_WARM_UP_S)
        before_s, cpu_s = cpu_times_s(), process_cpu_s(pid)
        elapsed_s = await streams.watch(setting.duration_s)
        cpu_s, busy = process_cpu_s(pid) - cpu_s, busy_share_since(before_s)
        load = streams.load
    p50_ms, p99_ms = (1e3 * percentile(load.delays_s, percent) if load.delays_s else None for percent in (50, 99))
    return Result(
        contender=contender,
        tokens_per_s=load.num_tokens / elapsed_s,
        cores=cpu_s / elapsed_s,
        tokens_per_core_s=load.num_tokens / cpu_s if contender != DIRECT else None,
        tokens_per_event=load.num_tokens / max(1, load.num_events),
        delay_p50_ms=p50_ms,
        delay_p99_ms=p99_ms,
        machine_busy=busy,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
