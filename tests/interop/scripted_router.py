"""A router whose nodes answer at once from a script, for those who ask thousands of things. Ends with its stdin."""

import asyncio
import sys

from tests.unit.router.openai.conftest import running_router, saying


async def main() -> None:
    async with running_router(saying("hello wörld")) as router:
        print(router.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
