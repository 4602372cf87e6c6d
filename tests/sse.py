"""Reading a stream of server-sent events as a client does."""

from collections.abc import AsyncIterator

import httpx


async def sse_events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """The id and the data of each, as they come; comments are left out."""
    event_id = ""
    async for line in _lines(response):
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, line.removeprefix("data: ")


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Those of httpx also end where a text has U+0085 or U+2028."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()
