"""GET, and nothing but its status: enough to ask a service how it is.

As a program it is a health check: `python -m kvasir.cli.http_probe 127.0.0.1:8000 /health` ends with 0 at a 200.
"""

import asyncio
import contextlib
import sys

from kvasir.common.addresses import split_address


async def http_status(host: str, port: int, path: str, timeout_s: float = 5.0) -> int | None:
    """None: nobody there, or no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(host, port, path)
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


async def _get(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return int((await reader.readline()).split()[1])  # HTTP/1.1 200 OK
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


if __name__ == "__main__":
    sys.exit(asyncio.run(http_status(*split_address(sys.argv[1]), sys.argv[2], timeout_s=2.0)) != 200)
