"""A complete connector, to begin one's own from: a TCP connection for each fetch, blocks one behind the other.

    kvasir prefill --connector docs.stream_connector:StreamConnector ...

The sender greets with 32 random bytes. The receiver answers with a proof that it knows the cluster's secret, and what
it wants: a verb, the transfer's name, and block keys of 32 bytes each. For each key it gets two lengths, the header
and the payload; or two zeros where the block is not there.
"""

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from kvasir.common.addresses import split_address
from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import MAX_HEADER_BYTES, BlockKey, BlockSource, Frame, Ticket, TransferId
from kvasir.kv_connector.settings import ConnectorSettings

FETCH, RELEASE, KEEP_ALIVE = range(3)
REQUEST = struct.Struct("<BHH")  # verb, length of the transfer's name, number of keys
LENGTHS = struct.Struct("<II")  # of a header and of a payload
PROOF_BYTES = KEY_BYTES = 32
STALL_TIMEOUT_S = 3.0  # who does not read for so long is not served further, and blocks nobody's memory


class StreamConnector:
    name = "docs.stream_connector:StreamConnector"
    is_store: Literal[False] = False

    def __init__(self, settings: ConnectorSettings) -> None:
        if not settings.secret:
            raise ValueError("this connector needs the cluster's secret")
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        self._source, self._max_payload_bytes = source, max_payload_bytes
        self._listener = socket.create_server((self._settings.listen_host, self._settings.listen_port))
        self._listener.setblocking(False)
        self._start(self._listen())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each gives back what it has borrowed
        self._listener.close()

    @property
    def endpoint(self) -> str:
        return self._settings.endpoint(self._listener.getsockname()[1])

    # Receiving.

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        payload = memoryview(bytearray(self._max_payload_bytes))
        async with self._request(ticket, FETCH, keys) as sock:
            for key in keys:
                num_header, num_payload = LENGTHS.unpack(await _receive(sock, LENGTHS.size))
                if num_header > MAX_HEADER_BYTES or num_payload > self._max_payload_bytes:
                    raise KVTransferError(f"a block of {num_header} and {num_payload} bytes was announced")
                header = await _receive(sock, num_header)
                await _fill(sock, payload[:num_payload])
                yield key, Frame(header, payload[:num_payload]) if num_header else None

    async def release(self, ticket: Ticket) -> None:
        async with self._request(ticket, RELEASE):
            pass

    async def keep_alive(self, ticket: Ticket) -> None:
        async with self._request(ticket, KEEP_ALIVE):
            pass

    @asynccontextmanager
    async def _request(self, ticket: Ticket, verb: int, keys: Sequence[BlockKey] = ()) -> AsyncIterator[socket.socket]:
        """The connection, once all is said. Whatever it raises is a `KVTransferError`: to be tried again, or not."""
        try:
            name, address = ticket.transfer_id.encode(), split_address(ticket.endpoints[0].address)
            with socket.socket() as sock:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, address)
                request = b"".join([REQUEST.pack(verb, len(name), len(keys)), name, *keys])
                proof = self._proof(await _receive(sock, PROOF_BYTES), request)
                await asyncio.get_running_loop().sock_sendall(sock, proof + request)
                yield sock
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise KVTransferError(f"{ticket.endpoints} cannot be asked: {error!r}") from error

    def _proof(self, nonce: bytes, request: bytes) -> bytes:
        return hmac.digest(self._settings.secret.encode(), nonce + request, "sha256")

    # Sending.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a receiver's trouble is not ours

    async def _listen(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._start(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with sock:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                nonce = os.urandom(PROOF_BYTES)
                await asyncio.get_running_loop().sock_sendall(sock, nonce)
                proof, fixed = await _receive(sock, PROOF_BYTES), await _receive(sock, REQUEST.size)
                verb, num_name, num_keys = REQUEST.unpack(fixed)
                rest = await _receive(sock, num_name + num_keys * KEY_BYTES)
            if not hmac.compare_digest(proof, self._proof(nonce, fixed + rest)):
                return
            transfer_id = TransferId(rest[:num_name].decode(errors="replace"))
            if verb == RELEASE:
                self._source.released(transfer_id)
            elif verb == KEEP_ALIVE:
                self._source.keep_alive(transfer_id)
            for start in range(num_name, len(rest), KEY_BYTES):
                await self._send(sock, transfer_id, BlockKey(rest[start : start + KEY_BYTES]))

    async def _send(self, sock: socket.socket, transfer_id: TransferId, key: BlockKey) -> None:
        frame = self._source.borrow(transfer_id, key)
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                header, payload = (frame.header, frame.payload) if frame else (b"", b"")
                lengths = LENGTHS.pack(len(header), len(payload))
                await asyncio.get_running_loop().sock_sendall(sock, lengths + header)
                await asyncio.get_running_loop().sock_sendall(sock, payload)  # the kernel has a copy when this returns
        finally:
            if frame is not None:
                self._source.give_back(transfer_id, key)


async def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await _fill(sock, memoryview(buffer))
    return bytes(buffer)


async def _fill(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        num_bytes = await asyncio.get_running_loop().sock_recv_into(sock, buffer)
        if not num_bytes:
            raise EOFError("the connection has ended")
        buffer = buffer[num_bytes:]
