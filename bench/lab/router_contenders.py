"""Routers that are measured, each started before backends of its own kind."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.lab.router_clock import FIRST_TOKEN_ID, NUM_TICKS, create_stamps
from kvasir.cli.ports import free_ports

OURS, OURS_TWICE, DIRECT = "kvasir", "kvasir --workers 2", "no router"
PEERS = {
    "sglang-router": ("sglang_router.launch_router", ["--log-level", "warn"]),
    "vllm-router": ("vllm_router.launch_router", ["--log-level", "warning"]),
}
_START_TIMEOUT_S = 300.0
_REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_streams: int
    num_tokens: int  # of an answer, on average
    num_groups: int  # of streams: nodes
    duration_s: float
    folder: Path  # a directory of a model without weights, and the stamps
    peer_python: str | None
    router_cpu: int | None = None  # which it has for itself

    @property
    def stamps(self) -> Path:
        return self.folder / "stamps"


@contextmanager
def running(contender: str, setting: Setting, interval_s: float) -> Iterator[tuple[int, int]]:
    """Port, and the router's process."""
    is_ours = contender in (OURS, OURS_TWICE)
    command = [sys.executable, "-m", "kvasir.bench.lab.router_backends", "node" if is_ours else "echo"]
    command += ["--stamps", str(setting.stamps), "--interval-s", str(interval_s)]
    command += ["--groups", str(setting.num_groups), "--streams", str(setting.num_streams)]
    with _process(command, stdout=subprocess.PIPE) as backends:
        assert backends.stdout is not None, "asked for as a pipe"
        ports = [int(word) for word in backends.stdout.readline().split()]
        if contender == DIRECT:
            yield ports[0], backends.pid
            return
        port, other_port = free_ports(2)
        if is_ours:
            command = _our_command(setting.folder, port, other_port, ports)
            command += ["--workers", "2"] if contender == OURS_TWICE else []
        else:
            command = _peer_command(contender, setting.peer_python, port, other_port, ports[0])
        with _process(command, stdout=subprocess.DEVNULL) as router:
            if setting.router_cpu is not None:
                os.sched_setaffinity(router.pid, {setting.router_cpu})
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/ready?decode={len(ports)}" if is_ours else f"{url}/health", router)
            _wait_for(f"{url}/v1/chat/completions", router, _REQUEST)
            yield port, router.pid


def _our_command(model: Path, port: int, grpc_port: int, node_ports: Sequence[int]) -> list[str]:
    nodes = ",".join(f"127.0.0.1:{node}" for node in node_ports)
    command = [sys.executable, "-m", "kvasir.router", "--model", str(model), "--port", str(port), "--decode", nodes]
    return [*command, "--served-model-name", "m", "--grpc-listen", f"127.0.0.1:{grpc_port}"]


def _peer_command(name: str, python: str | None, port: int, metrics_port: int, backend_port: int) -> list[str]:
    assert python is not None, "peers have an environment of their own"
    module, options = PEERS[name]
    command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", f"http://127.0.0.1:{backend_port}", "--policy", "round_robin"]
    return [*command, "--disable-retries", "--disable-circuit-breaker", *options]


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


def prepare(setting: Setting) -> None:
    """A tokenizer whose token after the bytes' is ' 0000', and so on; and the file of stamps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{number:04}" for number in range(NUM_TICKS))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.id_to_token(FIRST_TOKEN_ID) == "Ġ0000"
    tokenizer.save(str(setting.folder / "tokenizer.json"))
    (setting.folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    create_stamps(setting.stamps)
