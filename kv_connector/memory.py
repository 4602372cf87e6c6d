"""The peer connector within one process: the reference for others, and for tests of clusters without sockets."""

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, Ticket
from kvasir.kv_connector.settings import ConnectorSettings

_sources: dict[str, BlockSource] = {}
_numbers = itertools.count(1)


class MemoryConnector:
    name = "memory"
    is_store: Literal[False] = False

    def __init__(self, settings: ConnectorSettings) -> None:
        self._endpoint = f"memory:{next(_numbers)}"

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        _sources[self._endpoint] = source

    async def close(self) -> None:
        _sources.pop(self._endpoint, None)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        for key in keys:
            source = self._source(ticket)
            if source is None:
                raise KVTransferError(f"nobody is at {ticket.endpoints}")
            frame = source.borrow(ticket.transfer_id, key)
            try:
                yield key, frame
            finally:
                if frame is not None:
                    source.give_back(ticket.transfer_id, key)

    async def release(self, ticket: Ticket) -> None:
        if source := self._source(ticket):
            source.released(ticket.transfer_id)

    async def keep_alive(self, ticket: Ticket) -> None:
        if source := self._source(ticket):
            source.keep_alive(ticket.transfer_id)

    def _source(self, ticket: Ticket) -> BlockSource | None:
        return _sources.get(ticket.endpoints[0].address) if ticket.endpoints else None
