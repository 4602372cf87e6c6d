"""What one fetch of the tcp connector asks a link for, and the replies that come back, in any order."""

import asyncio
from collections.abc import Sequence

from kvasir.kv_connector.base import BlockKey, Frame, TransferId
from kvasir.kv_connector.tcp.link import Link, Reply


class Requests:
    """What one fetch has asked a link for and has not received yet."""

    def __init__(self, link: Link, transfer_id: TransferId) -> None:
        self._link = link
        self._transfer_id = transfer_id
        self._keys: dict[int, BlockKey] = {}
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._keys)

    async def ask(self, keys: Sequence[BlockKey]) -> int:
        """Request the first few of `keys`. Returns how many; 0 where taking in a reply should come first."""
        if self._keys and len(self._keys) > self._link.window_size // 2:
            return 0  # many small requests cost more than a few large ones
        if self._keys and (self._link.window.locked() or self._link.why_lost):
            return 0
        numbers = await self._link.ask(self._transfer_id, keys, self._replies)
        self._keys.update(zip(numbers, keys, strict=False))
        return len(numbers)

    async def next(self) -> tuple[BlockKey, Frame | None]:
        """The next block to arrive, in any order; None if the sender does not have it. KVTransferError: link lost."""
        reply = await self._replies.get()
        if reply is None:
            raise self._link.loss()
        number, frame = reply
        self._link.window.release()
        return self._keys.pop(number), frame

    def close(self) -> None:
        """What has not arrived is not wanted any more."""
        for number in self._keys:
            self._link.forget(number)
