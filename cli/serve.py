"""`kvasir serve`: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.cli.child import ChildSpec
from kvasir.cli.cluster_plan import Addresses, Machine, child_environment, plan_cluster
from kvasir.cli.convert_gguf import ModelPreparationError
from kvasir.cli.cores import divide_kv_memory
from kvasir.cli.http_probe import http_status
from kvasir.cli.local_redis import ADVICE, find_server, redis_spec, redis_url
from kvasir.cli.ports import NoFreePort, free_ports
from kvasir.cli.serve_config import ServeConfig
from kvasir.cli.serve_output import Output, banner
from kvasir.cli.supervisor import ClusterFailed, Supervisor
from kvasir.common.addresses import why_not_bindable
from kvasir.common.machine import available_memory_bytes, usable_cpus
from kvasir.common.secrets import new_secret

_POLL_S = 0.25
_REMIND_S = 5.0
_LAST_WORDS_S = 10.0  # after their grace time, processes have this long to end by themselves


class CannotStart(Exception):
    """Said to the user as it is."""


def main(argv: list[str]) -> int:
    config = ServeConfig.load(argv, prog="kvasir serve")
    output = Output(sys.stderr)
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-")))
            model = find_model(config.model)
            return asyncio.run(run(config, prepare(config, model, directory), model.name, output))
    except (CannotStart, ModelPreparationError, NoFreePort, ClusterFailed, OSError) as error:
        output.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # before the cluster was there
        output.say("stopped")
        return 130


def find_model(path: Path | None) -> Path:
    if path is None:
        return prepare_builtin_model()
    if not (path / "config.json").is_file():
        raise CannotStart(f"{path} is no model directory: it holds no config.json (Hugging Face format is wanted)")
    return path.resolve()


def prepare(config: ServeConfig, model: Path, directory: Path) -> list[ChildSpec]:
    """The processes to start; the router is the last."""
    num_nodes = config.prefill + config.decode
    http_port, grpc_port, redis_port, *metrics_ports = free_ports(3 + num_nodes)
    http_port = config.port or http_port
    if reason := why_not_bindable(config.host, http_port):
        raise CannotStart(f"cannot listen on {config.host}:{http_port}: {reason}; see --host and --port")
    machine = Machine(
        cpus=tuple(usable_cpus()),
        available_bytes=available_memory_bytes(),
        weights_bytes=sum(file.stat().st_size for file in model.glob("*.safetensors")),
        environment=os.environ,
    )
    secret = new_secret()
    stores: list[ChildSpec] = []
    url = config.redis_url
    if config.connector == "redis" and url is None:
        url = redis_url(redis_port, secret)
        stores.append(_local_redis(machine, num_nodes, redis_port, directory, secret))
    addresses = Addresses(http_port=http_port, grpc_port=grpc_port, metrics_ports=tuple(metrics_ports))
    kv_path = config.kv_path or directory / "kv"
    return [*stores, *plan_cluster(config, model, machine, addresses, secret, url, kv_path)]


def _local_redis(machine: Machine, num_nodes: int, port: int, directory: Path, secret: str) -> ChildSpec:
    server = find_server()
    if server is None:
        raise CannotStart(ADVICE)
    max_bytes = divide_kv_memory(machine.available_bytes, machine.weights_bytes, num_nodes)
    return redis_spec(server, port, directory, secret, max_bytes, child_environment(machine.environment, secret))


async def run(config: ServeConfig, specs: list[ChildSpec], model_name: str, output: Output) -> int:
    """Until a signal, or until the cluster is broken. Whatever happens, no process is left behind."""
    supervisor = Supervisor(specs, output.show, output.say)
    stop = asyncio.Event()
    _on_signals(stop, supervisor, output)
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(wait_until_ready(config, specs, output))
    try:
        await supervisor.start()
        await _first_of(stopped, supervisor.failure, ready)
        if not stopped.done():
            supervisor.heal()
            print(banner(config, specs[-1], model_name), flush=True)
            await _first_of(stopped, supervisor.failure)
    finally:
        stopped.cancel()
        ready.cancel()
        await supervisor.stop(config.shutdown_grace_s + _LAST_WORDS_S)
    output.say("stopped")
    return 0


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done; raises what it raised."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


def _on_signals(stop: asyncio.Event, supervisor: Supervisor, output: Output) -> None:
    def on_signal() -> None:
        if stop.is_set():
            output.say("killing all processes")
            supervisor.kill()
        else:
            output.say("stopping; once more kills")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def wait_until_ready(config: ServeConfig, specs: list[ChildSpec], output: Output) -> None:
    """Until a generation has gone through router, prefill and decode; says meanwhile who is still loading."""
    started_s = said_s = time.monotonic()
    loading = {spec.name: spec.health for spec in specs if spec.health is not None}
    router_host, router_port = loading["router"]
    output.say(f"starting {', '.join(spec.name for spec in specs)}")
    timeout_s, path = config.start_timeout_s, f"/ready?prefill={config.prefill}&decode={config.decode}"
    while await http_status(router_host, router_port, path) != 200:
        for name, (host, port) in list(loading.items()):
            if await http_status(host, port, "/health") == 200:
                del loading[name]
                said_s = time.monotonic()
                output.say(f"{name} is up after {said_s - started_s:.1f} s")
        missing = ", ".join(loading) or "a first generation through all tiers"
        if time.monotonic() - started_s > timeout_s:
            raise CannotStart(f"not ready after {timeout_s:g} s; still waiting for: {missing}")
        if time.monotonic() - said_s > _REMIND_S:
            said_s = time.monotonic()
            output.say(f"waiting for: {missing}, for {said_s - started_s:.0f} s now")
        await asyncio.sleep(_POLL_S)
    output.say(f"ready after {time.monotonic() - started_s:.1f} s")
