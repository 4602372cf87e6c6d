"""The receiving end of the tcp connector: one DEALER socket to one sender, from the handshake to the first error."""

import asyncio
import functools
import hmac
import itertools
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvasir.common.errors import KVTransferError
from kvasir.common.own_time import Limit, OwnTime
from kvasir.kv_connector.base import BlockKey, Frame, TransferId
from kvasir.kv_connector.errors import OtherVersion
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.tcp.loop_socket import LoopSocket

_HANDSHAKE_TIMEOUT_S = 2.0
_OVERDUE_S = 10.0  # a sender that has not answered a forgotten request by then is taken for lost
_LOST = {
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed; is encryption on at both ends, or off?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this cluster's secret",
}
_RECONNECT_AFTER_MS = 3600_000
_link_numbers = itertools.count()
_HEAD_BYTES = len(protocol.BLOCK) + protocol.NUMBER_BYTES

Reply = tuple[int, Frame | None] | None  # the request's number and its block; None: the link is lost


class Link:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[Any]]",
        address: str,
        max_payload_bytes: int,
        window: int,
        keys: protocol.Keys,
        is_encrypted: bool,
    ) -> None:
        self.why_lost = ""
        self.ended = asyncio.Event()
        self._kind_of_loss = KVTransferError
        self.window_size = window
        self.window = asyncio.Semaphore(window)  # counts blocks asked for and not yet taken in
        self._address = address
        self._max_payload_bytes = max_payload_bytes
        self._keys = keys
        self._nonce = os.urandom(protocol.NONCE_BYTES)
        self._has_proved = False  # the sender has shown that it knows the secret
        self._next_number = 0
        self._unanswered: dict[int, asyncio.Queue[Reply] | None] = {}  # None: nobody waits any more
        self._is_settled = asyncio.Event()  # set once the sender has let us in, or the link is lost
        self._raw = context.socket(zmq.DEALER)
        max_reply_bytes = protocol.max_reply_bytes(max_payload_bytes)
        protocol.configure(self._raw, max_reply_bytes, address.startswith("["))
        protocol.guard_receiver(self._raw, keys, is_encrypted)
        # We close a lost link long before zmq would reconnect. With reconnecting switched off, zmq would discard the
        # messages that arrived before the loss.
        self._raw.set(zmq.RECONNECT_IVL, _RECONNECT_AFTER_MS)
        # Bounds memory, whatever the sender does.
        max_unread = 2 * window * max_payload_bytes // max_reply_bytes
        self._raw.set(zmq.RCVHWM, max(max_unread, 2))
        monitor_address = f"inproc://kv-link-{next(_link_numbers)}"
        events = functools.reduce(operator.or_, _LOST)
        self._monitor = LoopSocket(self._raw.get_monitor_socket(events, monitor_address), self._see)
        self._socket = LoopSocket(self._raw, self._take)

    async def connect(self) -> None:
        clock = OwnTime(asyncio.get_running_loop().time)
        try:
            self._raw.connect(f"tcp://{self._address}")
            self.say(protocol.hello(self._nonce))
            async with Limit(clock, clock() + _HANDSHAKE_TIMEOUT_S):
                await self._is_settled.wait()
        except (TimeoutError, zmq.ZMQError) as error:
            self.close(str(error) or "no answer")
        except asyncio.CancelledError:
            self.close("closed")
            raise
        if self.why_lost:
            raise self.loss()

    def close(self, why: str) -> None:
        self._lose(why)
        self.ended.set()
        if not self._raw.closed:
            self._raw.disable_monitor()  # first, or zmq would wait for ever to notify a closed monitor
        self._monitor.close()
        self._socket.close()

    def loss(self) -> KVTransferError:
        """The error to raise for a lost link."""
        return self._kind_of_loss(self.why_lost)

    def say(self, *fields: bytes) -> None:
        if not self.why_lost:
            with suppress(zmq.ZMQError):  # the monitor reports the loss
                self._socket.send(b"".join(fields))

    async def ask(self, transfer_id: TransferId, keys: Sequence[BlockKey], replies: asyncio.Queue[Reply]) -> range:
        """Request the first few of `keys`, as many as the window has room for; waits until that is at least one.

        Returns the numbers of the requests. Each reply is put into `replies`.
        """
        await self.window.acquire()
        num_keys = 1
        while num_keys < min(len(keys), protocol.MAX_KEYS_A_REQUEST) and not self.window.locked():
            await self.window.acquire()
            num_keys += 1
        if self.why_lost:
            self.window.release()  # wakes the next waiter, which raises too
            raise self.loss()
        numbers = range(self._next_number, self._next_number + num_keys)
        self._next_number = numbers.stop
        self._unanswered.update(dict.fromkeys(numbers, replies))
        self.say(protocol.fetch(numbers.start, transfer_id, keys[:num_keys]))
        return numbers

    def forget(self, number: int) -> None:
        """Nobody waits for this reply any more. Its place in the window is free once the reply has come."""
        if number in self._unanswered:
            self._unanswered[number] = None
            asyncio.get_running_loop().call_later(_OVERDUE_S, self._check_overdue, number)
        else:
            self.window.release()

    def _check_overdue(self, number: int) -> None:
        if number in self._unanswered:
            self._lose("a request was never answered")

    def _lose(self, why: str, kind: type[KVTransferError] = KVTransferError) -> None:
        if self.why_lost:
            return
        self._kind_of_loss = kind
        self.why_lost = f"{self._address} is lost: {why}"
        for replies in self._unanswered.values():
            if replies is not None:
                replies.put_nowait(None)
        self._unanswered.clear()
        self.window.release()
        self._is_settled.set()
        asyncio.get_running_loop().call_soon(self.close, why)

    # What arrives.

    def _see(self, event: list[zmq.Frame]) -> None:
        self._socket.drain()  # replies that arrived before the loss still count
        self._lose(_LOST[zmq.Event(parse_monitor_message([frame.bytes for frame in event])["event"])])

    def _take(self, message: list[zmq.Frame]) -> None:
        head = message[0].bytes
        word, rest = head[:1], head[1:]
        if word == protocol.BLOCK and len(message) == 2 and len(head) >= _HEAD_BYTES:
            number = int.from_bytes(head[len(protocol.BLOCK) : _HEAD_BYTES], "little")
            self._answer(number, Frame(head[_HEAD_BYTES:], message[1].buffer))
        elif word == protocol.TRAY and len(message) == 2:
            self._take_tray(rest, message[1].buffer)
        elif word == protocol.ABSENT and len(message) == 1 and len(head) == _HEAD_BYTES:
            self._answer(int.from_bytes(rest, "little"), None)
        elif word == protocol.CHALLENGE and len(message) == 1:
            self._prove(rest)
        elif word == protocol.WELCOME and self._has_proved:
            self._is_settled.set()
        elif word == protocol.REFUSED:
            self._refused(protocol.parse_refused(rest))
        else:
            self._lose(f"it sent {head[:16]!r} in {len(message)} frames")

    def _take_tray(self, entries: bytes, payloads: memoryview) -> None:
        blocks = protocol.parse_tray(entries, payloads)
        if blocks is None:
            self._lose("it sent a tray that is not what its entries say")
            return
        for number, frame in blocks:
            self._answer(number, frame)

    def _refused(self, version: int) -> None:
        if version == protocol.VERSION:
            self._lose("it refused this node")
        else:
            why = f"it speaks version {version} of the protocol, this node {protocol.VERSION}"
            self._lose(why, OtherVersion)

    def _prove(self, challenge: bytes) -> None:
        sender_nonce, proof = challenge[: protocol.NONCE_BYTES], challenge[protocol.NONCE_BYTES :]
        if not hmac.compare_digest(proof, self._keys.proof(protocol.SENDER, self._nonce, sender_nonce)):
            self._lose("it does not know this cluster's secret")
            return
        self._has_proved = True
        self.say(protocol.ANSWER + self._nonce + self._keys.proof(protocol.RECEIVER, self._nonce, sender_nonce))

    def _answer(self, number: int, frame: Frame | None) -> None:
        if frame is not None and frame.payload.nbytes > self._max_payload_bytes:
            self._lose(f"it sent a block of {frame.payload.nbytes} bytes")
            return
        if number not in self._unanswered:
            return  # a duplicate
        replies = self._unanswered.pop(number)
        if replies is None:
            self.window.release()
        else:
            replies.put_nowait((number, frame))
