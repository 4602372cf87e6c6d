"""Where the processes of one router find each other: unix sockets in a folder that only their user may enter."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from kvasir.common.grpc_options import client_options, server_options
from kvasir.common.own_time import own_timeout
from kvasir.proto import registry_pb2_grpc, workers_pb2_grpc

_MAX_MESSAGE_BYTES = (1 << 31) - 1  # they trust each other; what is stored of a response has bounds of its own


class Places:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hub(self) -> str:
        return f"unix:{self.folder}/hub"

    def worker(self, number: int) -> str:
        return f"unix:{self.folder}/worker-{number}"


def channel_to(place: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(place, options=client_options(_MAX_MESSAGE_BYTES))


def server_at(place: str) -> grpc.aio.Server:
    """To add servicers to, and start."""
    server = grpc.aio.server(options=server_options(_MAX_MESSAGE_BYTES))
    server.add_insecure_port(place)
    return server


def hub_stub(channel: grpc.aio.Channel) -> Any:
    return workers_pb2_grpc.WorkersHubServiceStub(channel)  # type: ignore[no-untyped-call]


def worker_stub(channel: grpc.aio.Channel) -> Any:
    return workers_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]


def registry_stub(channel: grpc.aio.Channel) -> Any:
    return registry_pb2_grpc.RegistryServiceStub(channel)  # type: ignore[no-untyped-call]


class NoAnswer(Exception):
    pass


async def answer_of(method: Any, request: Any, within_s: float) -> Any:
    """By own time: a stall of ours is no silence of the other's. Raises NoAnswer."""
    try:
        async with own_timeout(within_s):
            return await method(request)
    except TimeoutError:
        raise NoAnswer(f"nothing came within {within_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise NoAnswer(error.code().name) from error
    except grpc.aio.UsageError as error:  # the channel has been closed
        raise NoAnswer(str(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise NoAnswer("the channel was closed meanwhile") from None  # which cancels its calls, and not who waits
