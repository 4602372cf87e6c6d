"""The receiving end of the tcp connector: one DEALER to one sender, from its handshake to the first trouble.

A link does not mend: whatever happens to it fails all that waits for it, and the next fetch makes a new one.
"""

import asyncio
import hmac
import itertools
import os
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector import tcp_protocol as protocol
from kvasir.kv_connector.base import BlockKey, Frame, TransferId
from kvasir.kv_connector.header import MAX_HEADER_BYTES

_HANDSHAKE_TIMEOUT_S = 2.0
_OVERDUE_S = 10.0  # a request that nobody waits for any more must be answered all the same
_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_link_numbers = itertools.count()

Reply = tuple[bytes, Frame | None] | None  # the request and its block; None: the link is lost


class Link:
    def __init__(self, context: zmq.asyncio.Context, address: str, max_payload_bytes: int, window: int) -> None:
        self.why_lost = ""  # empty while it lives
        self.window = asyncio.Semaphore(window)  # blocks asked for and not yet taken in
        self._address = address
        self._socket = context.socket(zmq.DEALER)
        protocol.configure(self._socket, max(max_payload_bytes, MAX_HEADER_BYTES), address.startswith("["))
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.RCVHWM, 2 * window)  # whatever a sender does, no more than this is buffered here
        self._monitor = self._socket.get_monitor_socket(_LOST_EVENTS, f"inproc://kv-link-{next(_link_numbers)}")
        self._numbers = itertools.count()
        self._unanswered: dict[bytes, asyncio.Queue[Reply] | None] = {}  # None: forgotten
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, secret: str) -> None:
        """Returns when each side has proved that it knows the secret."""
        watch = asyncio.create_task(self._watch())
        shake = asyncio.create_task(self._shake_hands(secret))
        shake.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if only by us
        self._tasks = [watch, shake]
        try:
            self._socket.connect(f"tcp://{self._address}")
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await asyncio.wait({watch, shake}, return_when=asyncio.FIRST_COMPLETED)
            if self.why_lost or not shake.done():
                raise KVTransferError(self.why_lost)
            shake.result()
        except (TimeoutError, zmq.ZMQError, KVTransferError) as error:
            self.close(str(error) or "no answer")
            raise KVTransferError(self.why_lost) from error
        except asyncio.CancelledError:
            self.close("closed")
            raise
        self._tasks.append(asyncio.create_task(self._read()))

    def close(self, why: str) -> None:
        self._lose(why)
        for task in self._tasks:
            task.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()  # first: zmq would wait for ever to tell a monitor that is closed
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def requests(self, transfer_id: TransferId) -> "Requests":
        return Requests(self, transfer_id)

    async def say(self, *frames: bytes) -> None:
        with suppress(zmq.ZMQError):  # the monitor says why
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)

    async def ask(self, transfer_id: TransferId, key: BlockKey, replies: asyncio.Queue[Reply]) -> bytes:
        """As soon as the window allows; the reply will go to `replies`. Returns the request's name."""
        await self.window.acquire()
        if self.why_lost:
            self.window.release()  # for the next one who waits
            raise KVTransferError(self.why_lost)
        request = next(self._numbers).to_bytes(8, "little")
        self._unanswered[request] = replies
        await self.say(protocol.FETCH, request, transfer_id.encode(), key)
        return request

    def forget(self, request: bytes) -> None:
        """Nobody waits for it any more. Its room in the window is free when its reply is no longer on the way."""
        if request in self._unanswered:
            self._unanswered[request] = None
            asyncio.get_running_loop().call_later(_OVERDUE_S, self._check_overdue, request)
        else:
            self.window.release()

    def _check_overdue(self, request: bytes) -> None:
        if request in self._unanswered:
            self._lose("a request was never answered")

    def _lose(self, why: str) -> None:
        if self.why_lost:
            return
        self.why_lost = f"{self._address} is lost: {why}"
        for replies in self._unanswered.values():
            if replies is not None:
                replies.put_nowait(None)
        self._unanswered.clear()
        self.window.release()
        asyncio.get_running_loop().call_soon(self.close, why)

    async def _shake_hands(self, secret: str) -> None:
        nonce = os.urandom(protocol.NONCE_BYTES)
        await self._socket.send_multipart([protocol.HELLO, nonce])
        match await self._socket.recv_multipart():
            case [protocol.CHALLENGE, sender_nonce, proof] if hmac.compare_digest(
                proof, protocol.proof(secret, protocol.SENDER, nonce, sender_nonce)
            ):
                own_proof = protocol.proof(secret, protocol.RECEIVER, nonce, sender_nonce)
                await self._socket.send_multipart([protocol.ANSWER, nonce, own_proof])
            case _:
                raise KVTransferError("it does not know the cluster's secret")
        if await self._socket.recv_multipart() != [protocol.WELCOME]:
            raise KVTransferError("it refused this node")

    async def _watch(self) -> None:
        event = await recv_monitor_message(self._monitor)
        self._lose(zmq.Event(event["event"]).name or "lost")

    async def _read(self) -> None:
        while not self.why_lost:
            try:
                frames = await self._socket.recv_multipart(copy=False)
            except zmq.ZMQError as error:
                self._lose(str(error))
                return
            word = frames[0].bytes
            if word == protocol.BLOCK and len(frames) == 4:
                self._answer(frames[1].bytes, Frame(frames[2].bytes, frames[3].buffer))
            elif word == protocol.ABSENT and len(frames) == 2:
                self._answer(frames[1].bytes, None)
            else:
                self._lose(f"it sent {word[:16]!r} with {len(frames)} frames")

    def _answer(self, request: bytes, frame: Frame | None) -> None:
        if request not in self._unanswered:
            return  # a duplicate
        replies = self._unanswered.pop(request)
        if replies is None:
            self.window.release()
        else:
            replies.put_nowait((request, frame))


class Requests:
    """What one fetch has asked a link for."""

    def __init__(self, link: Link, transfer_id: TransferId) -> None:
        self._link = link
        self._transfer_id = transfer_id
        self._keys: dict[bytes, BlockKey] = {}
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def may_ask(self) -> bool:
        """True if asking makes sense now: there is room, or nothing else to wait for."""
        return not self._keys or not self._link.window.locked()

    async def ask(self, key: BlockKey) -> None:
        self._keys[await self._link.ask(self._transfer_id, key, self._replies)] = key

    async def next(self) -> tuple[BlockKey, Frame | None]:
        reply = await self._replies.get()
        if reply is None:
            raise KVTransferError(self._link.why_lost)
        request, frame = reply
        self._link.window.release()
        return self._keys.pop(request), frame

    def close(self) -> None:
        for request in self._keys:
            self._link.forget(request)
