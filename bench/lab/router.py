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
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

import uvloop

from kvasir.bench.lab.router_backends import FIRST_TOKEN_ID, NUM_TICKS
from kvasir.bench.lab.router_load import Streams
from kvasir.cli.ports import free_ports

OURS, OURS_TWICE, DIRECT = "kvasir", "kvasir --workers 2", "no router"
_PEERS = {
    "sglang-router": ("sglang_router.launch_router", ["--log-level", "warn"]),
    "vllm-router": ("vllm_router.launch_router", ["--log-level", "warning"]),
}
_START_TIMEOUT_S = 60.0
_WARM_UP_S = 3.0
_FLAT_OUT_INTERVAL_S = 0.005  # 200 tokens a second in each stream: more than anything here passes on
_REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    contender: str
    tokens_per_s: float
    cores: float  # CPU time of the router over time
    tokens_per_core_s: float
    tokens_per_event: float
    delay_p50_ms: float
    delay_p99_ms: float
    machine_busy: float  # share of the time of all CPUs in which anything ran, this included


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_streams: int
    num_tokens: int
    num_groups: int
    duration_s: float
    folder: Path
    peer_python: str | None

    @property
    def stamps(self) -> Path:
        return self.folder / "stamps"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvasir bench router", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, on average (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=16, help="that the streams are spread over (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration-s", type=float, default=5.0, help="of one measurement (default: %(default)s)")
    parser.add_argument("--peer-python", help="python of an environment with sglang-router and vllm-router")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    parser.add_argument("--only", default="", help="contenders, separated by commas")
    parser.add_argument("--rates", default="flat", help="tokens/s in all, or `flat` (out), separated by commas")
    parser.add_argument(
        "--add", action="store_true", help="rounds to those that the output has: measure piece by piece"
    )
    options = parser.parse_args(argv)
    contenders = [OURS, OURS_TWICE, *(_PEERS if options.peer_python else ()), DIRECT]
    if options.only:
        contenders = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            num_streams=options.streams,
            num_tokens=options.tokens,
            num_groups=options.nodes,
            duration_s=options.duration_s,
            folder=Path(folder),
            peer_python=options.peer_python,
        )
        _prepare(setting)
        found = {}
        for rate in options.rates.split(","):
            title = "Flat out" if rate == "flat" else f"Paced, {rate} tokens/s in all"
            interval_s = _FLAT_OUT_INTERVAL_S if rate == "flat" else options.streams / float(rate)
            found[title] = compare(contenders, setting, options.rounds, interval_s)
    about = about_machine() | {"streams": options.streams, "tokens": options.tokens, "nodes": options.nodes}
    about |= {"duration_s": options.duration_s}
    _write(options.output, about, _joined(_known(options.output), found) if options.add else found)
    return 0


def _known(folder: Path) -> dict[str, list[Result]]:
    """What has been measured there before."""
    path = folder / "router.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    known.pop("machine", None)
    return {title: [_from_json(one) for one in results] for title, results in known.items()}


def _joined(known: dict[str, list[Result]], found: dict[str, list[Result]]) -> dict[str, list[Result]]:
    return {title: [*known.get(title, ()), *found.get(title, ())] for title in [*known, *(found.keys() - known.keys())]}


def _write(folder: Path, about: dict[str, Any], sections: dict[str, list[Result]]) -> None:
    sections = dict(sorted(sections.items(), key=lambda one: (len(one[0]), one[0])))  # by rate
    everything = {"machine": about} | {name: [as_json(one) for one in results] for name, results in sections.items()}
    text = as_markdown(about, sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "router.json").write_text(json.dumps(everything, indent=2) + "\n")
    (folder / "router.md").write_text(text)
    print(text)


def compare(contenders: Sequence[str], setting: Setting, num_rounds: int, interval_s: float) -> list[Result]:
    results = []
    for _ in range(num_rounds):
        for contender in contenders:
            result = measure(contender, setting, interval_s)
            print(result, file=sys.stderr)
            results.append(result)
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
        cpu_s, busy_s = cpu_seconds(pid), _busy_seconds()
        elapsed_s = await streams.watch(setting.duration_s)
        cpu_s, busy_s = cpu_seconds(pid) - cpu_s, _busy_seconds() - busy_s
        load = streams.load
    return Result(
        contender=contender,
        tokens_per_s=load.num_tokens / elapsed_s,
        cores=cpu_s / elapsed_s,
        tokens_per_core_s=load.num_tokens / cpu_s if contender != DIRECT else float("nan"),
        tokens_per_event=load.num_tokens / max(1, load.num_events),
        delay_p50_ms=1e3 * quantile(load.delays_s, 0.5),
        delay_p99_ms=1e3 * quantile(load.delays_s, 0.99),
        machine_busy=busy_s / elapsed_s / (os.cpu_count() or 1),
    )


@contextmanager
def running(contender: str, setting: Setting, interval_s: float) -> Iterator[tuple[int, int]]:
    """Port, and the router's process."""
    backend = ["--stamps", str(setting.stamps), "--interval-s", str(interval_s), "--groups", str(setting.num_groups)]
    backend += ["--streams", str(setting.num_streams)]
    kind = "node" if contender in (OURS, OURS_TWICE) else "echo"
    command = [sys.executable, "-m", "kvasir.bench.lab.router_backends", kind, *backend]
    with _process(command, stdout=subprocess.PIPE) as source:
        assert source.stdout is not None, "asked for as a pipe"
        ports = [int(word) for word in source.stdout.readline().split()]
        if contender == DIRECT:
            yield ports[0], source.pid
            return
        port, grpc_port, metrics_port = free_ports(3)
        if contender in (OURS, OURS_TWICE):
            nodes = ",".join(f"127.0.0.1:{node}" for node in ports)
            command = [sys.executable, "-m", "kvasir.router", "--model", str(setting.folder), "--port", str(port)]
            command += ["--served-model-name", "m", "--grpc-listen", f"127.0.0.1:{grpc_port}", "--decode", nodes]
            command += ["--workers", "2"] if contender == OURS_TWICE else []
            ready = f"http://127.0.0.1:{port}/ready?decode={len(ports)}"
        else:
            module, arguments = _PEERS[contender]
            assert setting.peer_python is not None, "peers have an environment of their own"
            command = [setting.peer_python, "-m", module, "--host", "127.0.0.1", "--port", str(port), *arguments]
            command += ["--disable-retries", "--disable-circuit-breaker"]
            command += ["--worker-urls", f"http://127.0.0.1:{ports[0]}", "--policy", "round_robin"]
            command += ["--prometheus-port", str(metrics_port)]
            ready = f"http://127.0.0.1:{port}/health"
        with _process(command, stdout=subprocess.DEVNULL) as router:
            _wait_for(ready, router)
            _wait_for(f"http://127.0.0.1:{port}/v1/chat/completions", router, _REQUEST)
            yield port, router.pid


@contextmanager
def _process(command: list[str], stdout: int) -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", body: bytes | None = None) -> None:
    opener: Any = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with opener.open(request, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not start")


def _prepare(setting: Setting) -> None:
    """A tokenizer whose token after the bytes' is ' 0000', and so on; and the file of stamps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{number:04}" for number in range(NUM_TICKS))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.id_to_token(FIRST_TOKEN_ID) == "Ġ0000"
    tokenizer.save(str(setting.folder / "tokenizer.json"))
    (setting.folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    setting.stamps.write_bytes(bytes(8 * NUM_TICKS))


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads, what it has waited for of its children, and those that run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = " ".join((task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return own_s + sum(cpu_seconds(int(child)) for child in children.split())


def _busy_seconds() -> float:
    """Of all CPUs together."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def quantile(samples: "array[float]", share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))] if samples else float("nan")


def about_machine() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def as_json(result: Result) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: None if value != value else value for name, value in asdict(result).items()}


def _from_json(values: dict[str, Any]) -> Result:
    given: dict[str, Any] = {name: float("nan") if value is None else value for name, value in values.items()}
    return Result(**given)


def as_markdown(about: dict[str, Any], sections: dict[str, list[Result]]) -> str:
    lines = ["# The router alone", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [*(__doc__ or "").strip().split("\n\n", 1)[1].split("\n"), ""]
    columns = [column.name for column in fields(Result) if column.name != "contender"]
    for title, results in sections.items():
        lines += [f"## {title}: medians over the rounds (least to most)", ""]
        lines += ["| | rounds | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
        for name in dict.fromkeys(one.contender for one in results):
            of_it = [one for one in results if one.contender == name]
            cells = [_cell([getattr(one, column) for one in of_it]) for column in columns]
            lines.append(f"| {name} | {len(of_it)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if any(value != value for value in values):
        return "-"
    digits = 0 if max(values) > 1000 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
