"""What `kvasir serve` starts: from the configuration and the machine to command lines. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.child import ChildSpec
from kvasir.cli.cores import CoreShare, divide_cores, divide_kv_memory
from kvasir.cli.serve_config import OptionValue, ServeConfig
from kvasir.common.secrets import CLUSTER_SECRET_VARIABLE

STOP_ROUTER, STOP_NODES, STOP_STORES = range(3)
_OURS = ("KVASIR_SERVE_", "KVASIR_CONFIG")  # our own options are not the children's


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to divide."""

    cpus: tuple[int, ...]
    available_bytes: int
    weights_bytes: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Free ports on loopback, and where the API listens."""

    http_port: int
    grpc_port: int
    metrics_ports: tuple[int, ...]  # of the prefill nodes, then of the decode nodes


def plan_cluster(
    config: ServeConfig,
    model: Path,
    machine: Machine,
    addresses: Addresses,
    secret: str,
    redis_url: str | None = None,
    kv_path: Path | None = None,
) -> list[ChildSpec]:
    """Prefill nodes, decode nodes and the router, in the order in which they start."""
    num_nodes = config.prefill + config.decode
    shares = divide_cores(machine.cpus, config.prefill, config.decode, config.pin_cores)
    kv_memory = config.kv_cache_memory or str(
        divide_kv_memory(machine.available_bytes, machine.weights_bytes, num_nodes)
    )
    names = [f"prefill-{index}" for index in range(config.prefill)]
    names += [f"decode-{index}" for index in range(config.decode)]
    environment = child_environment(machine.environment, secret)
    common = _node_options(config, model, addresses, kv_memory, kv_path)
    nodes = [
        _node(config, name, share, port, common, environment, redis_url)
        for name, share, port in zip(names, shares, addresses.metrics_ports, strict=True)
    ]
    return [*nodes, _router(config, model, addresses, environment)]


def child_environment(environ: Mapping[str, str], secret: str) -> dict[str, str]:
    """Ours without our own options, and with the cluster's secret."""
    inherited = {name: value for name, value in environ.items() if not name.startswith(_OURS)}
    quiet = {"GRPC_VERBOSITY": "ERROR"}  # else each end of a connection is a line of its own
    return quiet | inherited | {CLUSTER_SECRET_VARIABLE: secret, "PYTHONUNBUFFERED": "1"}


def _node_options(
    config: ServeConfig, model: Path, addresses: Addresses, kv_memory: str, kv_path: Path | None
) -> dict[str, OptionValue]:
    options: dict[str, OptionValue | None] = {
        "model": str(model),
        "listen": "127.0.0.1:0",
        "join": f"127.0.0.1:{addresses.grpc_port}",
        "connector": config.connector,
        "kv_path": str(kv_path) if kv_path and config.connector == "shared_storage" else None,
        "kv_cache_memory": kv_memory,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "drain_grace_s": config.shutdown_grace_s,
        "log_level": config.log_level,
    }
    return {name: value for name, value in options.items() if value is not None}


def _node(
    config: ServeConfig,
    name: str,
    share: CoreShare,
    metrics_port: int,
    common: Mapping[str, OptionValue],
    environment: Mapping[str, str],
    redis_url: str | None,
) -> ChildSpec:
    role = name.partition("-")[0]
    own = config.prefill_options if role == "prefill" else config.decode_options
    options = {**common, "metrics_port": metrics_port, "threads": share.num_threads}
    if role == "decode" and config.speculative_config is not None:
        options["speculative_config"] = config.speculative_config.model_dump_json(exclude_none=True)
    if share.cpus:
        options["cpus"] = ",".join(map(str, share.cpus))
    # A URL may hold a password, which a command line would show to everybody.
    variables = {f"KVASIR_{role.upper()}_REDIS_URL": redis_url} if redis_url is not None else {}
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"kvasir.{role}_node", *as_arguments({**options, **own})),
        environment={**environment, **variables},
        health=("127.0.0.1", metrics_port),
        stop_order=STOP_NODES,
    )


def _router(config: ServeConfig, model: Path, addresses: Addresses, environment: Mapping[str, str]) -> ChildSpec:
    options = {
        "host": config.host,
        "port": addresses.http_port,
        "grpc_listen": f"127.0.0.1:{addresses.grpc_port}",
        "model": str(model),
        "shutdown_grace_s": config.shutdown_grace_s,
        "log_level": config.log_level,
        **config.router_options,
    }
    names = [word for name in config.served_model_name for word in ("--served-model-name", name)]
    variables = {"KVASIR_ROUTER_API_KEY": ",".join(config.api_key)} if config.api_key else {}
    return ChildSpec(
        name="router",
        command=(sys.executable, "-m", "kvasir.router", *as_arguments(options), *names),
        environment={**environment, **variables},
        health=(reachable_host(config.host), addresses.http_port),
        stop_order=STOP_ROUTER,
        can_restart=False,  # the address that clients know: whoever runs us must learn that it is gone
    )


def reachable_host(host: str) -> str:
    """Where a server that listens on `host` is found from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def as_arguments(options: Mapping[str, OptionValue]) -> list[str]:
    """{"max_num_seqs": 8, "prefix_caching": False} -> ["--max-num-seqs", "8", "--no-prefix-caching"]

    A command line has no values but texts, so "false" is False.
    """
    arguments: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        flag = {"true": True, "false": False}.get(str(value).lower())
        if flag is not None:
            arguments.append(f"--{option}" if flag else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments
