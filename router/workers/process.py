"""One worker as the parent has it: its process, and the ways to ask it."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import grpc.aio

from kvasir.common.own_time import own_timeout
from kvasir.proto import registry_pb2, workers_pb2
from kvasir.router.workers.door import hand_over
from kvasir.router.workers.places import NoAnswer, Places, answer_of, channel_to, registry_stub, worker_stub

_TELL_WITHIN_S = 2.0
_ENDS_WITHIN_S = 1.0  # a process that is dying closes its connections a little before it is dead
_NOT_FOR_WORKERS = ("KVASIR_ROUTER_", "KVASIR_CONFIG")  # they are told everything by us


class WorkerProcess:
    def __init__(self, number: int, places: Places, config_json: bytes) -> None:
        self.number = number
        self.is_up = False  # it may be given connections
        self.started_s = 0.0
        self.heard_s = 0.0  # when it last answered
        self._places = places
        self._config_json = config_json
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_WORKERS)}
        self.started_s = self.heard_s = time.monotonic()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvasir.router.workers.worker"),
                *(str(self.number), str(self._places.folder), str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for us; we stop them in order
            )
        assert self._process.stdin is not None, "asked for as a pipe"
        with suppress(ConnectionError):  # it is dead already, which `wait` will tell
            self._process.stdin.write(self._config_json)
            self._process.stdin.close()
            await self._process.stdin.wait_closed()
        self._channel = channel_to(self._places.worker(self.number))

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait_until_up(self) -> bool:
        """False if it ended first."""
        while self.is_running:
            if await self.tell(workers_pb2.TOPIC_LOAD) is not None:
                return True
            await asyncio.sleep(0.05)
        return False

    async def wait_until_ready(self, at_most_s: float) -> None:
        """Or until it has ended."""
        with suppress(TimeoutError):
            async with own_timeout(at_most_s):
                while self.is_running:
                    if await self.tell(workers_pb2.TOPIC_READY, "0 0") == b"":
                        return
                    await asyncio.sleep(0.05)

    async def ends_soon(self) -> bool:
        """It has closed its connections: is it dead?"""
        process = self._process  # and not the one that takes its place
        assert process is not None, "it has been started"
        with suppress(TimeoutError):
            async with own_timeout(_ENDS_WITHIN_S):
                await process.wait()
        return process.returncode is not None

    async def wait(self) -> int:
        """Its exit status; nothing of it is left then."""
        assert self._process is not None, "it has been started"
        status = await self._process.wait()
        self.is_up = False
        if self._control is not None:
            self._control.close()
        if self._channel is not None:
            await self._channel.close(None)
        return status

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def take(self, connection: socket.socket) -> bool:
        return self.is_up and self._control is not None and hand_over(self._control, connection)

    async def tell(self, topic: workers_pb2.Topic.ValueType, argument: str = "") -> bytes | None:
        """None if it does not answer."""
        request = workers_pb2.TellRequest(topic=topic, argument=argument)
        answer = await self._ask(worker_stub(self._open_channel()).Tell, request)
        if answer is None:
            return None
        self.heard_s = time.monotonic()
        return bytes(answer.content)

    async def announce(self, request: registry_pb2.AnnounceRequest) -> str:
        """Why it cannot use the node; empty if it can, or does not answer."""
        answer = await self._ask(registry_stub(self._open_channel()).Announce, request)
        return "" if answer is None else str(answer.refused_because)

    async def withdraw(self, request: registry_pb2.WithdrawRequest) -> None:
        await self._ask(registry_stub(self._open_channel()).Withdraw, request)

    async def _ask(self, method: Any, request: Any) -> Any:
        """None if it does not answer."""
        with suppress(NoAnswer):
            return await answer_of(method, request, _TELL_WITHIN_S)
        return None

    def _open_channel(self) -> grpc.aio.Channel:
        assert self._channel is not None, "it has been started"
        return self._channel
