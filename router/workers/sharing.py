"""What a worker asks the parent, or another worker, for."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import grpc.aio
import orjson

from kvasir.common.logging import Sparse
from kvasir.common.own_time import own_timeout
from kvasir.proto import workers_pb2 as pb
from kvasir.router.assembly import Alone
from kvasir.router.config import RouterConfig
from kvasir.router.openai.errors import StoreUnavailable
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.noted_streams import NotedStreams
from kvasir.router.openai.responses.store import ResponseStore, StoredResponse
from kvasir.router.openai.sse import EventStream
from kvasir.router.openai.stream_notes import Notes
from kvasir.router.overview import Overview, OwnOverview, Picture
from kvasir.router.tenants.budgets import Balance, Budget, Budgets
from kvasir.router.workers.hub_notes import HubNotes
from kvasir.router.workers.places import NoAnswer, Places, answer_of, channel_to, worker_stub

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class AmongWorkers(Alone):
    listens_for_nodes = False  # the parent does, and passes on what it hears

    def __init__(self, number: int, places: Places, hub: Any) -> None:
        self._number = number
        self._places = places
        self._hub = hub

    def memory_budgets(self) -> Budgets:
        return HubBudgets(self._hub, self._number)

    def memory_store(self, config: RouterConfig) -> ResponseStore:
        return HubResponseStore(self._hub)

    def streams(self, config: RouterConfig, notes: Notes | None) -> KeptStreams:
        """A stream is kept by the worker that generates it, and read from there wherever its client comes back. If
        that worker has died, the one that the client comes to goes on with it."""
        others = [self._places.worker(number) for number in range(config.workers) if number != self._number]
        return NotedStreams(
            notes or HubNotes(self._hub, self._number),
            [partial(_resumed_at, place) for place in others],
            max_grace_s=config.max_resume_grace_s,
            max_streams=config.max_resumable_streams,
            max_of_one=config.max_resumable_streams_of_one,
        )

    def overview(self, own: OwnOverview) -> Overview:
        return WholeOverview(self._hub, own)


class HubBudgets:
    """A parent that does not answer limits nobody; it is about to be missed by more than this."""

    def __init__(self, hub: Any, worker: int) -> None:
        self._hub = hub
        self._worker = worker
        self._sparse = Sparse()

    async def take(self, name: str, budget: Budget, amount: float) -> Balance:
        request = pb.TakeBudgetRequest(name=name, budget=_budget(budget), amount=amount)
        found = await self._ask(self._hub.TakeBudget, request)
        if found is None:
            return Balance(True, budget.capacity, 0.0)
        return Balance(found.is_allowed, found.left, found.wait_s)

    async def charge(self, name: str, budget: Budget, amount: float) -> None:
        request = pb.ChargeBudgetRequest(name=name, budget=_budget(budget), amount=amount)
        await self._ask(self._hub.ChargeBudget, request)

    async def enter(self, name: str, member: str, num_places: int, ttl_s: float) -> bool:
        request = pb.EnterRoomRequest(name=name, member=member, num_places=num_places, ttl_s=ttl_s, worker=self._worker)
        found = await self._ask(self._hub.EnterRoom, request)
        return found is None or bool(found.has_entered)

    async def leave(self, name: str, member: str) -> None:
        request = pb.LeaveRoomRequest(name=name, member=member, worker=self._worker)
        await self._ask(self._hub.LeaveRoom, request)

    async def close(self) -> None:
        """The channel is the process's."""

    async def _ask(self, method: Any, request: Any) -> Any:
        """None if the parent does not answer."""
        try:
            return await answer_of(method, request, _TIMEOUT_S)
        except NoAnswer as error:
            if self._sparse.allows("failed"):
                log.warning("limits are not kept while the parent does not answer: %s", error)
            return None


class HubResponseStore:
    def __init__(self, hub: Any) -> None:
        self._hub = hub

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        request = pb.GetStoredRequest(owner=owner, response_id=response_id)
        answer = await self._ask(self._hub.GetStored, request)
        return StoredResponse.from_bytes(answer.content) if answer.HasField("content") else None

    async def put(self, owner: str, stored: StoredResponse) -> None:
        request = pb.PutStoredRequest(owner=owner, response_id=stored.response_id, content=stored.to_bytes())
        await self._ask(self._hub.PutStored, request)

    async def delete(self, owner: str, response_id: str) -> bool:
        request = pb.DeleteStoredRequest(owner=owner, response_id=response_id)
        return bool((await self._ask(self._hub.DeleteStored, request)).was_there)

    async def close(self) -> None:
        """The channel is the process's."""

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            return await answer_of(method, request, _TIMEOUT_S)
        except NoAnswer as error:
            raise StoreUnavailable(f"the store of responses does not answer: {error}") from error


async def _resumed_at(place: str, owner: str, last_event_id: str) -> EventStream | None:
    channel = channel_to(place)
    call = worker_stub(channel).Resume(pb.ResumeRequest(owner=owner, last_event_id=last_event_id))

    async def close() -> None:
        call.cancel()
        await channel.close(None)

    async def events() -> AsyncGenerator[bytes, None]:
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            yield message.event

    try:
        async with own_timeout(_TIMEOUT_S):
            is_there = await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]
    except (grpc.aio.AioRpcError, TimeoutError):
        is_there = False
    except BaseException:
        await close()
        raise
    if is_there:
        return EventStream(events(), close)
    await close()
    return None


class WholeOverview:
    """Of all workers that are up; of this one alone should the parent not answer."""

    def __init__(self, hub: Any, own: OwnOverview) -> None:
        self._hub = hub
        self._own = own

    async def why_not_ready(self, num_prefill: int, num_decode: int) -> str:
        contents = await self._gather(pb.TOPIC_READY, f"{num_prefill} {num_decode}")
        if not contents:
            return await self._own.why_not_ready(num_prefill, num_decode)
        return next((content.decode() for content in contents if content), "")

    async def load(self) -> int:
        contents = await self._gather(pb.TOPIC_LOAD)
        return sum(map(int, contents)) if contents else await self._own.load()

    async def metrics(self) -> bytes:
        try:
            answer = await answer_of(self._hub.TotalMetrics, pb.TotalMetricsRequest(), _TIMEOUT_S)
        except NoAnswer:
            return await self._own.metrics()
        return bytes(answer.content)

    async def pictures(self, answer: str) -> list[Picture]:
        contents = await self._gather(pb.TOPIC_CLUSTER, answer)
        return [orjson.loads(content) for content in contents] if contents else await self._own.pictures(answer)

    async def _gather(self, topic: pb.Topic.ValueType, argument: str = "") -> list[bytes]:
        try:
            request = pb.GatherRequest(topic=topic, argument=argument)
            return list((await answer_of(self._hub.Gather, request, _TIMEOUT_S)).contents)
        except NoAnswer:
            return []


def _budget(budget: Budget) -> pb.Budget:
    return pb.Budget(capacity=budget.capacity, per_s=budget.per_s)
