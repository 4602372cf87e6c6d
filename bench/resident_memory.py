"""How much memory the processes of a service hold, from their /metrics, while something else goes on."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

_RESIDENT = re.compile(r"^process_resident_memory_bytes(?:\{.*\})? (\S+)", re.MULTILINE)
_TIMEOUT = aiohttp.ClientTimeout(total=10)

# by process: when (seconds, of time.perf_counter) and how many bytes
MemorySamples = dict[str, list[tuple[float, float]]]


def process_name(url: str) -> str:
    """Host and port; and the path, where it is not the usual one."""
    parts = urlsplit(url)
    return f"{parts.netloc}{parts.path}".removesuffix("/metrics") or url


@asynccontextmanager
async def sampled_memory(
    session: aiohttp.ClientSession, urls: Sequence[str], every_s: float
) -> AsyncIterator[MemorySamples]:
    """What is sampled until the block ends. A URL that does not say its memory has no samples."""
    samples: MemorySamples = {process_name(url): [] for url in urls}

    async def sample(url: str) -> None:
        while True:
            if (resident := await resident_bytes(session, url)) is not None:
                samples[process_name(url)].append((time.perf_counter(), resident))
            await asyncio.sleep(every_s)

    tasks = [asyncio.create_task(sample(url)) for url in urls]
    try:
        yield samples
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def resident_bytes(session: aiohttp.ClientSession, url: str) -> float | None:
    """Of one process, or of all that its /metrics speaks for; None if it does not say."""
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            found = _RESIDENT.findall(await response.text()) if response.status == 200 else []
        return sum(map(float, found)) if found else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
