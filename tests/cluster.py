"""A cluster of real processes for the tests: one router, prefill and decode nodes, and what their connector needs.

Everything listens on loopback with ports of its own; every wait has a deadline; leaving the context stops all of it,
however it was left.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Self

import httpx
import openai

from tests.plain_http import NO_TLS
from tests.ports import held_port
from tests.service import REPO, Service
from tests.valkey import RedisServer

START_TIMEOUT_S = 450.0  # a first start compiles, and the machine may be busy with other things


class Cluster:
    """`with Cluster(...) as cluster:` is a cluster that has answered its canary."""

    def __init__(
        self,
        model_dir: Path,
        connector: str = "tcp",
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        router_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        redis_args: Sequence[str] = (),
        join_host: str = "127.0.0.1",
    ) -> None:
        self._stack = ExitStack()
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-test-")))
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")},
            "PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO}",
            "KVASIR_CLUSTER_SECRET": "a secret of the tests",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.model_dir = model_dir
        self.connector = connector
        self.redis: RedisServer | None = None
        self._redis_args = redis_args
        self._join = f"{join_host}:{self._own_port()}"
        port = self._own_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["kvasir.router", "--port", str(port), "--grpc-listen", self._join, "--model", str(model_dir)]
        # Up to five processes share two cores here: their silence means less than on machines of their own.
        arguments += ["--heartbeat-timeout-s", "10"]
        arguments += ["--max-local-prefill-tokens", "0"]  # how fast it is should not decide which tier a prompt goes to
        arguments += ["--grammar-timeout-s", "60"]  # nor which grammar is refused
        arguments += router_args
        self.router = self._service("router", arguments, f"{self.url}/metrics")
        self._node_args = {"prefill": prefill_args, "decode": decode_args}
        self.prefill: list[Service] = []
        self.decode: list[Service] = []
        self._counts = (num_prefill, num_decode)

    def __enter__(self) -> Self:
        try:
            if self._uses("redis"):
                self.redis = self._stack.enter_context(RedisServer(*self._redis_args))
            self._start(self.router)
            for _ in range(self._counts[0]):
                self.add_node("prefill")
            for _ in range(self._counts[1]):
                self.add_node("decode")
            self.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in [*self.prefill, *self.decode]:
            node.ask_to_stop()  # all at once, and then each is waited for
        self._stack.close()

    @property
    def services(self) -> list[Service]:
        return [self.router, *self.prefill, *self.decode]

    def add_node(
        self, role: str, extra_args: Sequence[str] = (), *, host: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> Service:
        """`prefix` stands before its command line, to run it elsewhere; `host` is its address there."""
        nodes = self.prefill if role == "prefill" else self.decode
        metrics_port = self._own_port()
        arguments = [f"kvasir.{role}_node", "--model", str(self.model_dir), "--join", self._join]
        arguments += ["--listen", f"{host}:0", "--metrics-port", str(metrics_port), "--connector", self.connector]
        arguments += ["--threads", "1", "--kv-cache-memory", "400MiB"]
        arguments += ["--kv-fetch", "always"]  # how busy this machine is should not decide what is fetched
        if self.redis is not None:
            arguments += ["--redis-url", self.redis.url]
        if self._uses("shared_storage"):
            arguments += ["--kv-path", str(self._directory / "kv")]
        arguments += [*self._node_args[role], *extra_args]
        node = self._service(f"{role}-{len(nodes)}", arguments, f"http://{host}:{metrics_port}/metrics")
        node.prefix = prefix
        nodes.append(node)
        self._start(node)
        return node

    def living(self, role: str) -> list[Service]:
        return [node for node in (self.prefill if role == "prefill" else self.decode) if node.is_alive]

    def have_at_least(self, num_prefill: int, num_decode: int) -> None:
        """Adds the nodes that are missing."""
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for _ in range(count - len(self.living(role))):
                self.add_node(role)
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until a generation has gone through both tiers, and every node that lives has joined."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            dead = [service for service in self.services if service.process.poll() not in (None, -signal.SIGKILL, 0)]
            if dead:
                raise AssertionError(f"{dead[0].name} has ended:\n{dead[0].log()[-4000:]}")
            if self._is_ready():
                return
            time.sleep(0.1)
        logs = "\n".join(f"--- {service.name}\n{service.log()[-2000:]}" for service in self.services)
        raise AssertionError(f"not ready within {timeout_s:.0f} s\n{logs}")

    def client(self, **options: object) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=NO_TLS)
        defaults: dict[str, object] = {"max_retries": 0, "timeout": 120, "api_key": "none", "http_client": http}
        client = openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})  # type: ignore[arg-type]
        return self._stack.enter_context(client)  # when the collector closes its sockets, pytest may fail for it

    @cached_property
    def model(self) -> str:
        with self.client() as client:  # nothing stays open that a test of leaks would count
            return str(client.models.list().data[0].id)

    def total(self, nodes: Sequence[Service], name: str) -> float:
        """A counter summed over nodes; a counter that none of them has is an error in the test."""
        samples = [node.metrics() for node in nodes]
        assert any(name in sample for sample in samples), f"no metric {name}; there are {sorted(samples[0])}"
        return sum(sample.get(name, 0.0) for sample in samples)

    @contextmanager
    def deltas(self, nodes: Sequence[Service], *names: str) -> Iterator[dict[str, float]]:
        """How far counters rose within the block."""
        before = {name: self.total(nodes, name) for name in names}
        rose: dict[str, float] = {}
        yield rose
        rose.update({name: self.total(nodes, name) - value for name, value in before.items()})

    def _own_port(self) -> int:
        return self._stack.enter_context(held_port())

    def _uses(self, connector: str) -> bool:
        return connector in self.connector.lower().replace("sharedstorage", "shared_storage")

    def _is_ready(self) -> bool:
        """All nodes that live are up, and a canary has gone through them."""
        prefill, decode = self.living("prefill"), self.living("decode")
        counts = {"prefill": len(prefill), "decode": len(decode)}
        try:
            for node in [*prefill, *decode]:
                node.metrics()
            return httpx.get(f"{self.url}/ready", params=counts, timeout=5, verify=NO_TLS).status_code == 200
        except httpx.HTTPError:
            return False

    def _service(self, name: str, arguments: Sequence[str], metrics_url: str) -> Service:
        return Service(name, arguments, self.environment, self._directory / f"{name}.log", metrics_url)

    def _start(self, service: Service) -> None:
        service.start()
        self._stack.callback(service.stop)
