"""A prefill node behind a network of its own, whose link goes down in mid-transfer: `make test-net`, as root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.test_faults import FETCHED, InBackground, expected, stream
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="network namespaces want root and ip"),
]

# A node that is not in the namespace and one that is, must not meet over shared memory or loopback.
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all"}


@dataclass(frozen=True)
class Network:
    """A namespace at the other end of a cable."""

    name: str
    here: str
    there: str

    def link(self, state: str) -> None:
        _ip("link", "set", f"{self.name}h", state)

    def shape(self, rate: str) -> None:
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, *_BURST)


_BURST = ("burst", "64kb", "latency", "100ms")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


@pytest.fixture
def network() -> Iterator[Network]:
    number = os.getpid() % 250
    made = Network(f"kv{os.getpid()}", f"10.213.{number}.1", f"10.213.{number}.2")
    _ip("netns", "add", made.name)
    try:
        _ip("link", "add", f"{made.name}h", "type", "veth", "peer", "name", "cable", "netns", made.name)
        _ip("address", "add", f"{made.here}/30", "dev", f"{made.name}h")
        _ip("-n", made.name, "address", "add", f"{made.there}/30", "dev", "cable")
        for device in ("lo", "cable"):
            _ip("-n", made.name, "link", "set", device, "up")
        made.link("up")
        yield made
    finally:
        _ip("netns", "delete", made.name)  # and the cable with it


@pytest.mark.parametrize("connector", ["tcp", "nixl", "mooncake"])
def test_link_goes_down_in_mid_transfer(connector: str, network: Network, model_dir: Path) -> None:
    if connector != "tcp":
        try:
            open_connector(ConnectorSettings(name=connector))
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
    prompt = next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "513-tokens")
    with Cluster(model_dir, connector, num_prefill=0, join_host=network.here, environment=UCX) as cluster:
        cluster.add_node("prefill", host=network.there, prefix=["ip", "netns", "exec", network.name])
        cluster.wait_ready()
        with cluster.deltas(cluster.decode, FETCHED) as rose:
            assert stream(cluster, prompt) == expected(prompt)
        assert rose[FETCHED] > 0

        network.shape("40mbit")  # so that its 24 MB take seconds
        before = cluster.total(cluster.decode, FETCHED)
        answer = InBackground(cluster, prompt, cache_salt="while it goes down")
        wait_until(lambda: cluster.total(cluster.decode, FETCHED) > before, 60, "a block has landed")
        network.link("down")
        assert answer.result() == expected(prompt)
        assert stream(cluster, prompt, cache_salt="while it is down") == expected(prompt)

        network.shape("10gbit")
        network.link("up")
        cluster.wait_ready()

        def is_fetched_again() -> bool:
            with cluster.deltas(cluster.decode, FETCHED) as rose:
                assert stream(cluster, prompt, cache_salt=f"up again {os.urandom(4).hex()}") == expected(prompt)
            return rose[FETCHED] > 0

        wait_until(is_fetched_again, 60, "blocks travel again")
