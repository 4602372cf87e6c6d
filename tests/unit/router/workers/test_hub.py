"""Places of workers that die are free, however late they were asked for; and nobody is ready who says nothing."""

import asyncio
from pathlib import Path

from kvasir.proto import workers_pb2 as pb
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.workers.hub import Hub
from kvasir.router.workers.places import Places
from kvasir.router.workers.process import WorkerProcess
from tests.waiting import until


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
    """`says` is what it answers, once it `may_say` it; None: it does not."""

    says: bytes | None = b""
    is_dying = False
    was_watched = False

    def __init__(self, number: int) -> None:
        super().__init__(number, Places(Path("/nowhere")), b"")
        self.is_up = True
        self.may_say = asyncio.Event()
        self.may_say.set()

    async def tell(self, topic: pb.Topic.ValueType, argument: str = "") -> bytes | None:
        await self.may_say.wait()
        return self.says

    async def ends_soon(self) -> bool:
        self.was_watched = True
        return self.is_dying


async def why_not_ready(hub: Hub) -> list[bytes]:
    answer = await hub.Gather(pb.GatherRequest(topic=pb.TOPIC_READY, argument="0 0"), None)
    return [content for content in answer.contents if content]


async def test_a_router_is_not_ready_while_one_of_its_workers_does_not_answer() -> None:
    _, other = workers = [Talking(number) for number in range(2)]
    hub = Hub(workers, MemoryResponseStore(ttl_s=60, max_bytes=1 << 20))
    assert await why_not_ready(hub) == []
    other.says = None
    assert await why_not_ready(hub) == [b"a worker does not answer"]
    other.is_dying = True
    assert await why_not_ready(hub) == [], "the others serve; it will be given nothing"
    other.is_up = False  # it has died: nobody is handed to it
    assert await why_not_ready(hub) == []
    other.is_up, other.says = True, b"no decode node is here"
    assert await why_not_ready(hub) == [b"no decode node is here"]


async def test_a_worker_that_dies_is_not_taken_for_the_one_in_its_place() -> None:
    """While another one took its time to answer, the new process had been started, which says nothing yet."""
    slow, dying = workers = [Talking(number) for number in range(2)]
    hub = Hub(workers, MemoryResponseStore(ttl_s=60, max_bytes=1 << 20))
    slow.may_say.clear()
    dying.says, dying.is_dying = None, True
    asking = asyncio.create_task(why_not_ready(hub))
    await until(lambda: dying.was_watched)
    dying.is_dying = False  # it is another process now
    slow.may_say.set()
    assert await asking == []
