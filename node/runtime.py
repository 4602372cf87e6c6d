"""One node as a process: start in order, serve, stop in reverse.

    model --> engine, connector --> /metrics, /health --> gRPC --> SERVING --> announced        SIGTERM:
    exit  <-- engine, connector <-- /metrics, /health <-- gRPC <-- withdrawn <-- drained <-- NOT_SERVING

SIGTERM and SIGINT drain and exit with 0; a second one cuts the drain short. A crashed engine exits with 1.
"""

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvasir.common.addresses import join_address, listening, split_address
from kvasir.common.errors import KVTransferError
from kvasir.common.grpc_server import bind, check_listen, new_server
from kvasir.common.secrets import cluster_secret
from kvasir.common.status_server import Health, StatusServer
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kv_connector.base import KVConnector
from kvasir.node.announce import Announcer, own_address
from kvasir.node.build import build
from kvasir.node.config import NodeConfig
from kvasir.node.description import description_of
from kvasir.node.node import Node
from kvasir.node.parts import NodeParts
from kvasir.node.servicer import NodeServicer
from kvasir.proto import common_pb2

log = logging.getLogger(__name__)

_STALLED_AFTER_S = 30.0  # a step takes seconds at most
_HEALTH_EVERY_S = 0.5
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """What tells prefill and decode nodes apart while they start."""

    name: Literal["prefill", "decode"]
    service: str  # full name
    make_node: Callable[[NodeParts], Node[Any]]
    add_to_server: Callable[[Any, grpc.aio.Server], None]  # as generated
    check_connector: Callable[[KVConnector], None] = lambda connector: None  # raises ValueError


def run_node(config: NodeConfig, kind: NodeKind) -> int:
    """The process's exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    path = str(config.cluster_secret_file) if config.cluster_secret_file else None
    try:
        secret = cluster_secret(os.environ, path)
        check_listen(config.listen, secret)  # now, and not after the model is loaded
        _check_ports(config)
        log.info("loading %s", config.model)
        parts = build(config, kind.name, secret, kind.check_connector)
    except (OSError, ValueError, ImportError, UnsupportedModel) as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        return asyncio.run(NodeProcess(config, kind, parts, secret).serve())
    except OSError as error:  # a port that somebody has taken meanwhile
        log.error("cannot start: %s", error)
        return 1


def _check_ports(config: NodeConfig) -> None:
    """OSError if one of them cannot be listened on, or if two are the same."""
    metrics = join_address(split_address(config.listen)[0], config.metrics_port)
    options = {"listen": config.listen, "metrics-port": metrics, "kv-listen": config.kv_listen}
    option_of: dict[int, str] = {}
    with ExitStack() as held:
        for option, address in options.items():
            if not address:
                continue
            host, port = split_address(address)
            try:
                held.enter_context(listening(host, port))
            except OSError as error:
                is_ours = error.errno == errno.EADDRINUSE and port in option_of
                reason = f"--{option_of[port]} has that port" if is_ours else error.strerror or error
                raise OSError(f"cannot listen on {address} (--{option}): {reason}") from error
            if port:
                option_of[port] = option


def _leave(number: int, _: object) -> None:
    """A signal while the model is being loaded: there is nothing to drain."""
    raise SystemExit(0)


class NodeProcess:
    def __init__(self, config: NodeConfig, kind: NodeKind, parts: NodeParts, secret: str | None) -> None:
        self._config = config
        self._kind = kind
        self._parts = parts
        self._secret = secret
        self._health = cast(Any, health).aio.HealthServicer()  # its stubs lack `aio`

    async def serve(self) -> int:
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        async with AsyncExitStack() as stack:
            node = self._kind.make_node(self._parts)
            try:
                await node.start()
            except (ValueError, KVTransferError) as error:  # the connector cannot be what it was told to be
                log.error("cannot start: %s", error)
                return 1
            stack.push_async_callback(node.close)
            description = await self._start_servers(node, stack)
            watch = asyncio.create_task(self._keep_health(node))
            stack.callback(watch.cancel)
            host, port = split_address(self._address)
            announcer = Announcer(self._config.join, join_address(host, port), description, self._secret)
            await announcer.start()
            stack.push_async_callback(announcer.close)
            log.info("%s node serves on %s, KV by %s", self._kind.name, self._address, description.connector)
            return await self._until_stopped(node, signals)

    async def _start_servers(self, node: Node[Any], stack: AsyncExitStack) -> common_pb2.NodeDescription:
        host = split_address(self._config.listen)[0]
        status = StatusServer(node.metrics.metrics, lambda: health_of(node))
        metrics_port = await status.start(join_address(host, self._config.metrics_port))
        stack.push_async_callback(status.close)
        server = new_server(self._config.listen, self._secret)
        port = bind(server, self._config.listen)
        advertised = self._config.advertise_host or own_address(host, self._config.join)
        self._address = join_address(advertised, port)
        description = description_of(node, join_address(advertised, metrics_port))
        self._kind.add_to_server(NodeServicer(node, description), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((self._kind.service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await server.start()
        stack.push_async_callback(server.stop, None)
        return description

    async def _until_stopped(self, node: Node[Any], signals: "asyncio.Queue[int]") -> int:
        """The exit status."""
        told = asyncio.create_task(signals.get())
        await _first_of(told, node.crashed)
        told.cancel()
        if not node.crashed.done():
            node.drain()
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            told_again, drained = asyncio.create_task(signals.get()), asyncio.create_task(node.drained())
            await _first_of(told_again, drained, node.crashed, timeout_s=self._config.drain_grace_s)
            log.info("drained" if drained.done() else f"leaving, though {len(node.in_flight)} requests are not done")
            told_again.cancel()
            drained.cancel()
        if not node.crashed.done():
            return 0
        log.error("leaving: the engine has crashed: %s", node.crashed.result())
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        with suppress(TimeoutError):  # the routers shall hear it
            await asyncio.wait_for(node.drained(), _LAST_WORDS_S)
        return 1

    async def _keep_health(self, node: Node[Any]) -> None:
        while True:
            serving = health_of(node).is_healthy and not node.is_draining
            response = health_pb2.HealthCheckResponse
            await self._set_health(response.SERVING if serving else response.NOT_SERVING)
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def _set_health(self, status: Any) -> None:
        for service in ("", self._kind.service):
            await self._health.set(service, status)


async def _first_of(*waiting: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def health_of(node: Node[Any]) -> Health:
    """Sick is what a restart would cure. A node that is busy, full or draining is well."""
    if node.crashed.done():
        return Health(False, "the engine has crashed")
    if node.engine.age_s > _STALLED_AFTER_S:
        return Health(False, f"the engine has not finished a step for {node.engine.age_s:.0f} s")
    return Health(True, "draining" if node.is_draining else "ok")
