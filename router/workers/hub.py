"""What there is one of, whatever worker asks for it: limits, stored responses, the view of all workers together."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
from collections.abc import Sequence
from typing import Any

from kvasir.proto import workers_pb2 as pb
from kvasir.proto import workers_pb2_grpc
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.tenants.budgets import Budget, MemoryBudgets
from kvasir.router.workers.process import WorkerProcess
from kvasir.router.workers.stream_records import StreamRecords
from kvasir.router.workers.totals import Totals


class Hub(workers_pb2_grpc.WorkersHubServiceServicer):
    def __init__(self, workers: Sequence[WorkerProcess], store: MemoryResponseStore) -> None:
        self._workers = workers
        self._store = store
        self._budgets = MemoryBudgets()
        self._places: dict[int, set[tuple[str, str]]] = {worker.number: set() for worker in workers}
        self._totals = Totals()
        self._streams = StreamRecords()

    async def died(self, worker: WorkerProcess) -> None:
        """Its requests are over, so their places are free."""
        self._totals.died(worker.number)
        self._streams.died(worker.number)
        places, self._places[worker.number] = self._places[worker.number], set()
        for name, member in places:
            await self._budgets.leave(name, member)

    async def refresh(self) -> None:
        """What workers have counted is known here, for the case that they die."""
        self._streams.drop_old()
        workers = [worker for worker in self._workers if worker.is_up]
        texts = await asyncio.gather(*(worker.tell(pb.TOPIC_METRICS) for worker in workers))
        for worker, text in zip(workers, texts, strict=True):
            if text is not None and worker.is_up:
                self._totals.note(worker.number, text.decode())

    # --- limits ----------------------------------------------------------------------------------------------------

    async def TakeBudget(self, request: pb.TakeBudgetRequest, context: Any) -> pb.TakeBudgetResponse:
        found = await self._budgets.take(request.name, _budget(request.budget), request.amount)
        return pb.TakeBudgetResponse(is_allowed=found.is_allowed, left=found.left, wait_s=found.wait_s)

    async def ChargeBudget(self, request: pb.ChargeBudgetRequest, context: Any) -> pb.ChargeBudgetResponse:
        await self._budgets.charge(request.name, _budget(request.budget), request.amount)
        return pb.ChargeBudgetResponse()

    async def EnterRoom(self, request: pb.EnterRoomRequest, context: Any) -> pb.EnterRoomResponse:
        if not self._workers[request.worker].is_up:  # it has died since it asked: nobody would give the place back
            return pb.EnterRoomResponse(has_entered=False)
        name, member = request.name, request.member
        has_entered = await self._budgets.enter(name, member, request.num_places, request.ttl_s)
        if has_entered:
            self._places[request.worker].add((name, member))
        return pb.EnterRoomResponse(has_entered=has_entered)

    async def LeaveRoom(self, request: pb.LeaveRoomRequest, context: Any) -> pb.LeaveRoomResponse:
        self._places[request.worker].discard((request.name, request.member))
        await self._budgets.leave(request.name, request.member)
        return pb.LeaveRoomResponse()

    # --- stored responses ------------------------------------------------------------------------------------------

    async def GetStored(self, request: pb.GetStoredRequest, context: Any) -> pb.GetStoredResponse:
        return pb.GetStoredResponse(content=self._store.get_bytes(request.owner, request.response_id))

    async def PutStored(self, request: pb.PutStoredRequest, context: Any) -> pb.PutStoredResponse:
        self._store.put_bytes(request.owner, request.response_id, request.content)
        return pb.PutStoredResponse()

    async def DeleteStored(self, request: pb.DeleteStoredRequest, context: Any) -> pb.DeleteStoredResponse:
        return pb.DeleteStoredResponse(was_there=await self._store.delete(request.owner, request.response_id))

    # --- streams whose clients may come back -----------------------------------------------------------------------

    async def NoteStreams(self, request: pb.NoteStreamsRequest, context: Any) -> pb.NoteStreamsResponse:
        if self._workers[request.worker].is_up:  # else it has died since, and its streams may be another one's
            for note in request.notes:
                self._streams.note(request.worker, note)
        return pb.NoteStreamsResponse()

    async def TakeStream(self, request: pb.TakeStreamRequest, context: Any) -> pb.TakeStreamResponse:
        if not self._workers[request.worker].is_up:
            return pb.TakeStreamResponse()
        return self._streams.take(request.worker, request.owner, request.response_id, request.endpoint)

    # --- all workers together --------------------------------------------------------------------------------------

    async def Gather(self, request: pb.GatherRequest, context: Any) -> pb.GatherResponse:
        workers = [worker for worker in self._workers if worker.is_up]
        contents = await asyncio.gather(*(_told(worker, request) for worker in workers))
        return pb.GatherResponse(contents=[content for content in contents if content is not None])

    async def TotalMetrics(self, request: pb.TotalMetricsRequest, context: Any) -> pb.TotalMetricsResponse:
        await self.refresh()
        return pb.TotalMetricsResponse(content=self._totals.render())


async def _told(worker: WorkerProcess, request: pb.GatherRequest) -> bytes | None:
    """None if it does not answer, and need not."""
    content = await worker.tell(request.topic, request.argument)
    if content is None and request.topic == pb.TOPIC_READY and not await worker.ends_soon():
        return b"a worker does not answer"  # and clients would wait for it
    return content


def _budget(message: pb.Budget) -> Budget:
    return Budget(message.capacity, message.per_s)
