"""HTTP by hand."""

import asyncio
from contextlib import suppress


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Until the server closes the connection, in whatever way."""
    answer = b""
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            answer += part
    return answer
