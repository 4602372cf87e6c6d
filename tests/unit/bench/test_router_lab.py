"""The load and the backends that the router is measured with."""

import asyncio
import os
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from kvasir.bench.lab.router_contenders import DIRECT, OURS, Setting, prepare, running
from kvasir.bench.lab.router_load import Load, Streams, _Stream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n"
EVENTS = b"".join(
    b'3f\r\ndata: {"delta":{"content":" %04d %04d"}}\n\n\r\n' % (number, number + 1) for number in (1, 3, 5)
)
ANSWER = HEAD + EVENTS + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.num_requests = 0

    def write(self, data: bytes) -> None:
        self.num_requests += 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_tokens_are_counted_however_the_network_cuts_them(size: int) -> None:
    load, lost = Load(), []
    stamps: Any = [time.monotonic()] * 10
    stream = _Stream(repeat(b"ask"), load, stamps, lost.append)
    transport: Any = Transport()
    stream.connection_made(transport)
    for _ in range(2):
        for start in range(0, len(ANSWER), size):
            stream.data_received(ANSWER[start : start + size])
    assert load.num_tokens == len(load.delays_s) == 12
    assert load.num_events == 6
    assert transport.num_requests == 3, "asked again at each end"
    assert not lost
    stream.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    assert "503" in str(lost[0])


@pytest.mark.parametrize("contender", [DIRECT, OURS])
async def test_each_stream_gets_a_token_a_tick(tmp_path: Path, contender: str) -> None:
    began_s = time.monotonic()
    cpu = min(os.sched_getaffinity(0))
    setting = Setting(
        num_streams=6, num_tokens=20, num_groups=2, duration_s=1, folder=tmp_path, peer_python=None, router_cpu=cpu
    )
    prepare(setting)
    manager = running(contender, setting, 0.01)
    port, pid = await asyncio.to_thread(manager.__enter__)
    try:
        assert contender == DIRECT or os.sched_getaffinity(pid) == {cpu}
        async with asyncio.timeout(60), Streams(port, 6, 20, setting.stamps) as streams:
            load = streams.load
            while load.num_tokens < 300:
                await asyncio.sleep(0.05)
            assert 0 < min(load.delays_s) <= max(load.delays_s) < time.monotonic() - began_s
            if contender == DIRECT:  # which sends each token by itself; the last one may be on its way
                assert load.num_tokens <= load.num_events <= load.num_tokens + 6
    finally:
        manager.__exit__(None, None, None)
