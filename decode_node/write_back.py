"""Blocks that a decode node has filled itself, on their way into the store: the next turn of a chat finds them there.

filled --> waiting --> written, or there already --> given back      by one task, some at a time
   |          |
   +----------+--> given back unwritten     no room to wait, the cache is short of blocks, the store fails
"""

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import KVBlock
from kvasir.kv_connector.sender import KVSender

log = logging.getLogger(__name__)

_MAX_AT_ONCE = 16


class WriteBack:
    """At most `max_blocks` are held for it, and none that `is_short` says others need."""

    def __init__(
        self,
        sender: KVSender,
        release_blocks: Callable[[Sequence[BlockId]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        is_short: Callable[[], bool],
        max_blocks: int,
    ) -> None:
        self._sender = sender
        self._release_blocks = release_blocks
        self._spawn = spawn
        self._is_short = is_short
        self._max_blocks = max_blocks
        self._waiting: deque[KVBlock] = deque()
        self._is_writing = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, blocks: Sequence[KVBlock]) -> None:
        """Each has a reference, which is ours from here on."""
        self._waiting.extend(blocks)
        room = 0 if self._is_short() else self._max_blocks
        self._give_up([self._waiting.pop() for _ in range(len(self._waiting) - room)][::-1])
        if self._waiting and not self._is_writing:
            self._is_writing = True
            self._spawn(self._write_all())

    def close(self) -> None:
        """What still waits, or comes later, is not written any more."""
        self._max_blocks = 0
        self.add(())

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                blocks = [self._waiting.popleft() for _ in range(min(_MAX_AT_ONCE, len(self._waiting)))]
                try:
                    await self._sender.store(blocks)
                except KVTransferError as error:
                    log.debug("%d blocks not written back: %s", len(blocks), error)
        except Exception:
            log.exception("writing back failed in an unforeseen way")
        finally:
            self._is_writing = False

    def _give_up(self, blocks: Sequence[KVBlock]) -> None:
        if blocks:
            self._sender.metrics.blocks_not_stored += len(blocks)
            self._release_blocks([block.block_id for block in blocks])
