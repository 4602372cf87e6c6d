"""A cluster started by `kvasir serve`, as a user would, and asked over HTTP."""

import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from kvasir.bench.lab.contenders import Tokens, steady_tokens_per_s
from kvasir.bench.lab.greedy_load import as_prompt, greedy_load
from kvasir.bench.report import timelines_of
from kvasir.bench.timeline import Timeline
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.cli.ports import free_ports

_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContender:
    """One prefill node and one decode node, with the cores divided between them."""

    name: str
    url: str
    prefill_metrics_url: str
    decode_metrics_url: str

    def prefill_s(self, prompt: Tokens) -> float:
        (timeline,) = self.run([prompt], 1)
        return timeline.ttft_s

    def decode_tokens_per_s(self, prompts: Sequence[Tokens], num_tokens: int) -> float:
        return steady_tokens_per_s(self.run(prompts, num_tokens))

    def run(self, prompts: Sequence[Tokens], num_tokens: int) -> list[Timeline]:
        """All at once."""
        return timelines_of(greedy_load(self.url, [as_prompt(prompt, num_tokens) for prompt in prompts]))


@contextmanager
def local_cluster(name: str, options: Sequence[str], has_metrics: bool = False) -> Iterator[ClusterContender]:
    """Ready when entered; all of it is gone when left. has_metrics: of its nodes, for one of each kind."""
    http_port, prefill_port, decode_port = free_ports(3)
    model = prepare_builtin_model()
    command = [sys.executable, "-m", "kvasir.cli.main", "serve", "--model", str(model), "--port", str(http_port)]
    if has_metrics:
        command += ["--prefill-options", f"metrics_port={prefill_port}"]
        command += ["--decode-options", f"metrics_port={decode_port}"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _wait_for_banner(process)
        yield ClusterContender(
            name=name,
            url=f"http://127.0.0.1:{http_port}",
            prefill_metrics_url=f"http://127.0.0.1:{prefill_port}/metrics",
            decode_metrics_url=f"http://127.0.0.1:{decode_port}/metrics",
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def _wait_for_banner(process: "subprocess.Popen[str]") -> None:
    """Its output is read to the end, so that it never waits for us to read."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None, "asked for as a pipe"
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    seen: list[str] = []
    while not (seen and seen[-1].startswith("Kvasir serves")):
        try:
            line = lines.get(timeout=_START_TIMEOUT_S)
        except Empty:
            line = None
        if line is None:
            raise RuntimeError("the cluster did not start:\n" + "".join(seen[-30:]))
        seen.append(line)


def read_metrics(url: str) -> dict[str, float]:
    """The sum of each metric over its labels."""
    opener: Any = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(url, timeout=10).read().decode()
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", text, flags=re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals
