"""A prefill node and a decode node on one machine, each on cores of its own: no thread of either is anywhere else."""

import os
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.service import Service

CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(CPUS) < 2, reason="one core cannot be divided"),
]


def cpus_of_threads(service: Service) -> dict[str, str]:
    """Where the kernel lets each thread of the process run, by the thread's number and name."""
    found: dict[str, str] = {}
    for task in Path(f"/proc/{service.process.pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        found[f"{task.name} {fields['Name']}"] = fields["Cpus_allowed_list"]
    return found


def test_every_thread_stays_on_its_nodes_cores(model_dir: Path) -> None:
    """Those of the engine and of torch, of gRPC, of the connector, and what they started."""
    first, last = str(CPUS[0]), str(CPUS[-1])
    with Cluster(
        model_dir,
        prefill_args=("--cpus", first, "--threads", "2"),
        decode_args=("--cpus", last, "--threads", "2"),
    ) as cluster:
        answer = cluster.client().completions.create(model=cluster.model, prompt="1 2 3 4 5 6", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        for service, cpu in ((cluster.prefill[0], first), (cluster.decode[0], last)):
            threads = cpus_of_threads(service)
            assert len(threads) >= 4  # event loop, engine, its second compute thread, sockets
            assert set(threads.values()) == {cpu}, threads
