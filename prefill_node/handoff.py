"""One prompt's blocks on their way out: published in the order in which they are computed.

computed --> queue --> publish --> progress --> ... --> commit       left to the receiver, its release or the lease
               |          |
               +-- abort -+-- store down                             every block's reference goes back at once
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvasir.common.errors import KVTransferError
from kvasir.common.hashing import transfer_key
from kvasir.engine.blocks import BlockId
from kvasir.engine.step import ComputedBlocks
from kvasir.kv_connector.base import BlockKey, KVBlock, Ticket
from kvasir.kv_connector.sender import KVSender

log = logging.getLogger(__name__)


class Handoff:
    """`on_progress(num_blocks, committed)`: so many leading blocks can be fetched; committed: there will be no more.

    A publish that fails does not fail the request: what comes after it is not published, the commit says how far it
    got, and the decode node computes the rest.
    """

    def __init__(
        self,
        ticket: Ticket,
        sender: KVSender,
        release_blocks: Callable[[Sequence[BlockId]], None],
        on_progress: Callable[[int, bool], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.ticket = ticket
        self._sender = sender
        self._release_blocks = release_blocks
        self._on_progress = on_progress
        self._queue: asyncio.Queue[ComputedBlocks | None] = asyncio.Queue()
        self._is_aborted = False
        self._has_failed = False
        self._num_published = 0
        self.num_queued_blocks = 0  # computed, and not published yet
        self._task = spawn(self._run())

    @property
    def is_done(self) -> bool:
        """Committed, or aborted with nothing left to give back."""
        return self._task.done()

    def add(self, computed: ComputedBlocks) -> None:
        if self._is_aborted or self._task.done():
            self._release_blocks(computed.block_ids)
        else:
            self.num_queued_blocks += len(computed.block_ids)
            self._queue.put_nowait(computed)

    def abort(self) -> None:
        """Nobody wants the blocks (any more). Fine at any time, and more than once."""
        self._is_aborted = True
        while not self._queue.empty():
            if computed := self._queue.get_nowait():
                self._drop(computed)
        self._queue.put_nowait(None)
        self._sender.abort(self.ticket.transfer_id)

    async def _run(self) -> None:
        while (computed := await self._queue.get()) is not None:
            if self._has_failed:
                self._drop(computed)
            else:
                await self._publish(computed)
            if self._is_aborted:
                continue  # with the None that the abort has put there
            if computed.is_last:
                self._sender.commit(self.ticket.transfer_id)
                self._on_progress(self._num_published, True)
                return
            self._on_progress(self._num_published, False)
        if self._is_aborted:
            self._sender.abort(self.ticket.transfer_id)  # what was being published meanwhile

    def _drop(self, computed: ComputedBlocks) -> None:
        self.num_queued_blocks -= len(computed.block_ids)
        self._release_blocks(computed.block_ids)

    async def _publish(self, computed: ComputedBlocks) -> None:
        try:
            await self._sender.publish(self.ticket, self._outgoing(computed))
            self._num_published = computed.first_index + len(computed.block_ids)
        except KVTransferError as error:
            log.warning("transfer %s: published %d blocks: %s", self.ticket.transfer_id, self._num_published, error)
            self._has_failed = True
        except Exception:  # without a commit, the receiver would wait for the rest until its deadline
            log.exception("transfer %s failed in an unforeseen way", self.ticket.transfer_id)
            self._has_failed = True
        finally:
            self.num_queued_blocks -= len(computed.block_ids)

    def _outgoing(self, computed: ComputedBlocks) -> list[KVBlock]:
        blocks = []
        for offset, block_id in enumerate(computed.block_ids):
            index = computed.first_index + offset
            key = computed.hashes[offset] or transfer_key(self.ticket.transfer_id, index)
            blocks.append(KVBlock(index, BlockKey(key), block_id, computed.num_tokens[offset]))
        return blocks
