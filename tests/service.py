"""One process of a test's cluster: started, frozen, killed, and asked for its metrics."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.plain_http import NO_TLS

REPO = Path(__file__).parents[1]
_OF_ALL = ("engine", "model_name", "connector")  # labels that are the same on all of a node's samples


@dataclass(eq=False)
class Service:
    """One process of the cluster."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    metrics_url: str
    prefix: Sequence[str] = ()  # of the command line
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", *self.arguments],
                env={**self.environment},
                stdout=log,
                stderr=log,
                cwd=REPO,
            )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask_to_stop(self) -> None:
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def stop(self) -> None:
        if self.is_alive:
            self.ask_to_stop()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def metrics(self) -> dict[str, float]:
        """Samples by name, and by `name{label="value",...}`: labels in order of name, but those of the whole node."""
        text = httpx.get(self.metrics_url, timeout=60, verify=NO_TLS).raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                own = {key: value for key, value in sample.labels.items() if key not in _OF_ALL}
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(own.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def num_open_sockets(self) -> int:
        fds = Path(f"/proc/{self.process.pid}/fd")
        return sum(os.readlink(fd).startswith("socket:") for fd in fds.iterdir() if fd.is_symlink())
