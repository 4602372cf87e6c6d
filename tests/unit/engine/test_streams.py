"""What blocks on their way wait for, on a device that only writes down what it was told."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kvasir.engine.block_transfer import BlockTransfer
from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_blocks import DeviceBlocks

SHAPE = (6, 2, 2, 2, 4, 8)


@dataclass(eq=False)
class Event:
    name: str
    log: list[str]
    is_done: bool = True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")
        self.is_done = True


@dataclass(eq=False)
class Stream:
    """Events are as done as `is_fast` says when they are recorded."""

    name: str
    log: list[str]
    is_fast: bool = True
    events: list[Event] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> Event:
        self.events.append(Event(f"{self.name}'s event {len(self.events)}", self.log, self.is_fast))
        self.log.append(self.events[-1].name)
        return self.events[-1]


class Device:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.compute = Stream("compute", self.log)
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self._within)

    def take(self, transfer: BlockTransfer, name: str) -> Stream:
        """From now on the transfer works on a stream of this device."""
        stream = Stream(name, self.log)
        pack, unpack = transfer._pack, transfer._unpack
        self._monkeypatch.setattr(transfer, "_stream", stream)
        self._monkeypatch.setattr(transfer, "_ids", lambda blocks: torch.tensor(blocks))
        self._monkeypatch.setattr(transfer, "_pack", lambda *given: (self.log.append("pack"), pack(*given)))
        self._monkeypatch.setattr(transfer, "_unpack", lambda *given: (self.log.append("unpack"), unpack(*given)))
        return stream

    @contextmanager
    def _within(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}:")
        yield
        self.log.append("back")

    def said(self) -> list[str]:
        said = self.log.copy()
        self.log.clear()
        return said


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_what_is_read_is_packed_behind_its_events_and_its_own_event_is_all_that_the_host_waits_for(
    device: Device,
) -> None:
    transfer = BlockTransfer(torch.randn(SHAPE), 2)
    device.take(transfer, "side")
    before = Event("a step", device.log)
    gathered = transfer.gather(ids(1, 3), [before])  # type: ignore[list-item]
    assert gathered is not None
    assert device.said() == ["on side:", "side waits for a step", "pack", "side's event 0", "back"]
    gathered.payloads()
    assert device.said() == ["the host waits for side's event 0"]
    transfer.gather(ids(2))
    assert device.said()[1] == "side waits for all of compute", "no events: what this thread has launched"


def test_a_buffer_is_used_again_when_its_copy_is_done_and_not_before(device: Device) -> None:
    transfer = BlockTransfer(torch.randn(SHAPE), 1, num_buffers=1)
    side = device.take(transfer, "side")
    side.is_fast = False
    payload = memoryview(bytes(transfer.payload_bytes))
    assert transfer.scatter(ids(1), [payload], [])
    assert device.said() == ["on side:", "unpack", "side's event 0", "back"]
    assert not transfer.scatter(ids(2), [payload], []), "its memory is still being read"
    assert transfer.gather(ids(2), []) is None
    assert device.said() == []
    transfer.wait()
    assert device.said() == ["the host waits for side's event 0"]
    assert transfer.scatter(ids(2), [payload], [])
    device.said()
    transfer.join()
    assert device.said() == ["compute waits for side's event 1"], "and the host for nothing"


def test_reads_and_writes_come_behind_the_last_step_and_all_that_has_come_in(device: Device) -> None:
    blocks = DeviceBlocks(torch.randn(SHAPE))
    outgoing, incoming = blocks._outgoing["none"], blocks._incoming["none"]
    packed = blocks._transfer(blocks._incoming, "int8")
    for transfer, name in ((outgoing, "out"), (incoming, "in"), (packed, "in by int8")):
        device.take(transfer, name)
    blocks.mark(Event("step 1", device.log))  # type: ignore[arg-type]
    blocks.write(BlockId(0), memoryview(bytes(incoming.payload_bytes)))
    assert device.said() == ["on in:", "in waits for step 1", "unpack", "in's event 0", "back"]
    blocks.write_packed(BlockId(0), "int8", memoryview(bytes(packed.payload_bytes)))
    assert device.said()[1:3] == ["in by int8 waits for step 1", "in by int8 waits for in's event 0"]
    blocks.mark(Event("step 2", device.log))  # type: ignore[arg-type]
    blocks.read(BlockId(0))
    waits = ["out waits for step 2", "out waits for in's event 0", "out waits for in by int8's event 0"]
    assert device.said() == ["on out:", *waits, "pack", "out's event 0", "back", "the host waits for out's event 0"]
    blocks.copy(BlockId(0), BlockId(1))
    assert device.said()[-2:] == ["in's event 1", "back"]
    blocks.join()
    assert device.said() == ["compute waits for in's event 1", "compute waits for in by int8's event 0"]
