"""Places of workers that die are free, however late they were asked for; and nobody is ready who says nothing."""

from pathlib import Path

from kvasir.proto import workers_pb2 as pb
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.workers.hub import Hub
from kvasir.router.workers.places import Places
from kvasir.router.workers.process import WorkerProcess


async def enters(hub: Hub, worker: int, member: str) -> bool:
    request = pb.EnterRoomRequest(name="tenant", member=member, num_places=1, ttl_s=600, worker=worker)
    return bool((await hub.EnterRoom(request, None)).has_entered)


async def test_a_worker_that_has_died_takes_no_place_with_it() -> None:
    workers = [WorkerProcess(number, Places(Path("/nowhere")), b"") for number in range(2)]
    hub = Hub(workers, MemoryResponseStore(ttl_s=60, max_bytes=1 << 20))
    for worker in workers:
        worker.is_up = True
    assert await enters(hub, 0, "a")
    assert not await enters(hub, 1, "b"), "one place"
    workers[0].is_up = False
    await hub.died(workers[0])
    assert not await enters(hub, 0, "c"), "it had asked before it died"
    assert await enters(hub, 1, "d")


class Talking(WorkerProcess):
    """`says` is what it answers; None: it does not."""

    says: bytes | None = b""
    is_dying = False

    async def tell(self, topic: pb.Topic.ValueType, argument: str = "") -> bytes | None:
        return self.says

    async def ends_soon(self) -> bool:
        return self.is_dying


async def why_not_ready(hub: Hub) -> list[bytes]:
    answer = await hub.Gather(pb.GatherRequest(topic=pb.TOPIC_READY, argument="0 0"), None)
    return [content for content in answer.contents if content]


async def test_a_router_is_not_ready_while_one_of_its_workers_does_not_answer() -> None:
    one, other = workers = [Talking(number, Places(Path("/nowhere")), b"") for number in range(2)]
    hub = Hub(workers, MemoryResponseStore(ttl_s=60, max_bytes=1 << 20))
    one.is_up = other.is_up = True
    assert await why_not_ready(hub) == []
    other.says = None
    assert await why_not_ready(hub) == [b"a worker does not answer"]
    other.is_dying = True
    assert await why_not_ready(hub) == [], "the others serve; it will be given nothing"
    other.is_up = False  # it has died: nobody is handed to it
    assert await why_not_ready(hub) == []
    other.is_up, other.says = True, b"no decode node is here"
    assert await why_not_ready(hub) == [b"no decode node is here"]
