"""The receiving end of a one-sided connector: one connection to one sender, from the handshake to the first error."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvasir.common.addresses import split_address
from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockKey, Frame, TransferId
from kvasir.kv_connector.errors import OtherVersion
from kvasir.kv_connector.one_sided import protocol
from kvasir.kv_connector.one_sided.batch import Answer, Batch, Lent
from kvasir.kv_connector.one_sided.engine import Pool, ReadEngine
from kvasir.kv_connector.one_sided.staging import CONNECT_TIMEOUT_S, StagedReads, Staging
from kvasir.kv_connector.settings import ConnectorSettings

T = TypeVar("T")

_ANSWER_TIMEOUT_S = 5.0
_READ_AHEAD_BYTES = 1 << 20
_MIN_SLOTS, _MAX_SLOTS = 2, protocol.MAX_KEYS_PER_FETCH


class Link:
    def __init__(self, address: str, engine: ReadEngine, settings: ConnectorSettings, max_payload_bytes: int) -> None:
        self.ended = asyncio.Event()
        self._address = address
        self._engine = engine
        self._settings = settings
        self._max_payload_bytes = max_payload_bytes
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count()
        self._batches: dict[bytes, Batch] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._reads: StagedReads | None = None
        self._num_remote_blocks = 0
        self._loan_s = 0.0

    @property
    def why_lost(self) -> str:
        return self._lost.result() if self._lost.done() else ""

    async def connect(self) -> None:
        """Returns once the engine can read, too."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader = await self._shake_hands()
        except Exception as error:
            self.close(str(error) or "no answer")
            kind = OtherVersion if isinstance(error, OtherVersion) else KVTransferError
            raise kind(self.why_lost) from error
        except BaseException:
            self.close("closed")
            raise
        self._reading = asyncio.create_task(self._read(reader))

    def close(self, why: str) -> None:
        """`ended` is set when the engine has stopped too, which may take long."""
        if self._lost.done():
            return
        self._lost.set_result(f"{self._address} is lost: {why}")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reads is None:
            self.ended.set()
        else:
            self._reads.close().add_done_callback(self._end)

    def say(self, *fields: bytes) -> None:
        if self._writer is not None and not self._lost.done():
            protocol.write(self._writer, *fields)

    async def fetch(
        self, transfer_id: TransferId, keys: Sequence[BlockKey]
    ) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        """Yield the frames in the order of `keys`. The next batch is read while the caller takes in this one."""
        waiting, started = deque(keys), deque[Batch]()
        try:
            while waiting or started:
                if not started:
                    started.append(await self._start(transfer_id, waiting))
                frames = await asyncio.shield(started[0].frames)
                if waiting and self._has_room:
                    started.append(await self._start(transfer_id, waiting))
                for key, frame in zip(started[0].keys, frames, strict=True):
                    yield key, frame
                self._give_slots_back(started.popleft())
        finally:
            for batch in started:
                batch.frames.add_done_callback(partial(self._give_slots_back, batch))

    # One batch.

    @property
    def _has_room(self) -> bool:
        return self._reads is not None and self._reads.staging.num_free > 0

    @property
    def _opened(self) -> StagedReads:
        if self._reads is None:
            raise KVTransferError(self.why_lost or "not connected yet")
        return self._reads

    async def _start(self, transfer_id: TransferId, waiting: deque[BlockKey]) -> Batch:
        staging = self._opened.staging
        while not staging.num_free:
            await self._or_lost(staging.has_free.wait())
        slots = staging.take(min(len(waiting), max(staging.num_slots // 2, 1)))
        keys = [waiting.popleft() for _ in slots]
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        request = next(self._numbers).to_bytes(8, "little")
        frames = asyncio.create_task(self._get(request, answers, slots))
        frames.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
        self._batches[request] = batch = Batch(keys, slots, frames, answers)
        frames.add_done_callback(lambda _: self._batches.pop(request))
        self.say(protocol.FETCH, request, transfer_id.encode(), *keys)
        return batch

    async def _get(
        self, request: bytes, answers: asyncio.Future[list[Answer]], slots: Sequence[int]
    ) -> list[Frame | None]:
        asked_s, staging = time.monotonic(), self._opened.staging
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                found = await self._or_lost(answers)
            lent = {slot: answer.block for slot, answer in zip(slots, found, strict=True) if isinstance(answer, Lent)}
            if lent:
                await self._read_lent(lent)
        except TimeoutError:
            self.close("it does not answer")
            raise KVTransferError(self.why_lost) from None
        finally:
            self.say(protocol.DONE, request)
        if time.monotonic() > asked_s + self._loan_s:
            raise KVTransferError(f"{self._address}: blocks were read later than they were lent for")
        return [
            Frame(answer.header, staging.slot(slot)) if isinstance(answer, Lent) else answer
            for slot, answer in zip(slots, found, strict=True)
        ]

    async def _read_lent(self, lent: dict[int, int]) -> None:
        """`lent` maps our slot to the sender's block."""
        if self._lost.done():  # the answers came just before the loss: nothing may be read from a lost peer
            raise KVTransferError(self.why_lost)
        reads = self._opened
        timeout_s = self._settings.transfer_allowance_s(len(lent) * reads.staging.pool.block_bytes)
        reading = reads.read(list(lent.values()), list(lent), timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._or_lost(asyncio.shield(reading))
        except Exception as error:
            self.close(f"reading failed: {error!r}")
            raise KVTransferError(self.why_lost) from error

    def _give_slots_back(self, batch: Batch, _: object = None) -> None:
        if self._reads is not None:
            self._reads.staging.put_back(batch.slots)

    async def _or_lost(self, awaitable: Awaitable[T]) -> T:
        """Wait for this, or for the loss of the link, which raises KVTransferError."""
        wanted = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {wanted, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                raise KVTransferError(self.why_lost)
            return wanted.result()
        finally:
            wanted.cancel()

    # The connection.

    async def _shake_hands(self) -> asyncio.StreamReader:
        host, port = split_address(self._address)
        reader, self._writer = await asyncio.open_connection(host, port, limit=_READ_AHEAD_BYTES)
        engine, pool, self._loan_s = await protocol.come_in(reader, self._writer, self._settings.secret)
        await self._meet(engine, Pool(*pool))
        return reader

    async def _meet(self, engine: bytes, remote: Pool) -> None:
        if remote.block_bytes > self._max_payload_bytes:
            raise KVTransferError(f"its blocks have {remote.block_bytes} bytes, ours at most {self._max_payload_bytes}")
        self._num_remote_blocks = remote.num_blocks
        slot_bytes = remote.block_bytes or self._max_payload_bytes
        num_slots = min(max(self._settings.window_bytes // slot_bytes, _MIN_SLOTS), _MAX_SLOTS)
        self._reads = StagedReads(self._engine, self._address, Staging(num_slots, slot_bytes))
        if remote.num_blocks:
            await self._reads.connect(engine, remote)

    def _end(self, _: object) -> None:
        self._reads = None
        self.ended.set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        max_bytes = protocol.max_answer_bytes(self._max_payload_bytes)
        try:
            while True:
                self._take(await protocol.read(reader, max_bytes))
        except KVTransferError as error:
            self.close(str(error))

    def _take(self, message: Sequence[bytes]) -> None:
        match message:
            case [protocol.LENT, request, index, header, block] if protocol.to_number(block) < self._num_remote_blocks:
                answer: Answer = Lent(header, protocol.to_number(block))
            case [protocol.INLINE, request, index, header, payload]:
                answer = Frame(header, memoryview(payload))
            case [protocol.ABSENT, request, index]:
                answer = None
            case _:
                raise protocol.BadMessage(f"it sent {message[0][:16]!r} with {len(message)} fields")
        if (batch := self._batches.get(request)) is not None:
            batch.take(protocol.to_number(index), answer)
