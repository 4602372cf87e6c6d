"""Places of workers that die are free, however late they were asked for."""

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
