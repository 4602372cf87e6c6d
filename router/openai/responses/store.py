"""Responses that a client may come back for, each with the conversation that it is the end of."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kvasir.router.openai.responses.items import ChatMessage, Item

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Each part is JSON, and read when it is wanted: a conversation's end has all of it, and most ask for less."""

    response_id: str
    response_json: bytes
    input_items_json: bytes
    messages_json: bytes

    @classmethod
    def of(cls, response: dict[str, Any], input_items: list[Item], messages: list[ChatMessage]) -> "StoredResponse":
        """`messages`: from the conversation's beginning to this response's end, without instructions."""
        return cls(response["id"], orjson.dumps(response), orjson.dumps(input_items), orjson.dumps(messages))

    @property
    def response(self) -> dict[str, Any]:
        response: dict[str, Any] = orjson.loads(self.response_json)
        return response

    @property
    def input_items(self) -> list[Item]:
        items: list[Item] = orjson.loads(self.input_items_json)
        return items

    @property
    def messages(self) -> list[ChatMessage]:
        messages: list[ChatMessage] = orjson.loads(self.messages_json)
        return messages

    @property
    def num_bytes_of_items(self) -> int:
        """Of input and output."""
        return len(self.response_json) + len(self.input_items_json)

    def to_bytes(self) -> bytes:
        """A part a line."""
        return b"\n".join((self.response_id.encode(), self.response_json, self.input_items_json, self.messages_json))

    @classmethod
    def from_bytes(cls, data: bytes) -> "StoredResponse":
        """ValueError for what another version of this has written."""
        response_id, response, input_items, messages = data.split(b"\n")
        return cls(response_id.decode(), response, input_items, messages)


class ResponseStore(Protocol):
    """`owner`: whoever a response belongs to; nobody else finds it. Raises StoreUnavailable."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def put(self, owner: str, stored: StoredResponse) -> None: ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """False: there was none."""
        ...

    async def close(self) -> None: ...


class MemoryResponseStore:
    """In this process alone. The oldest make room for new ones."""

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # until when, and what

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        data = self.get_bytes(owner, response_id)
        return None if data is None else StoredResponse.from_bytes(data)

    async def put(self, owner: str, stored: StoredResponse) -> None:
        self.put_bytes(owner, stored.response_id, stored.to_bytes())

    def get_bytes(self, owner: str, response_id: str) -> bytes | None:
        self._drop_old()
        entry = self._entries.get((owner, response_id))
        return None if entry is None else entry[1]

    def put_bytes(self, owner: str, response_id: str, data: bytes) -> None:
        self._remove((owner, response_id))
        self._entries[owner, response_id] = (self._clock() + self._ttl_s, data)
        self._num_bytes += len(data)
        self._drop_old()

    async def delete(self, owner: str, response_id: str) -> bool:
        self._drop_old()
        return self._remove((owner, response_id))

    async def close(self) -> None:
        self._entries.clear()

    def _drop_old(self) -> None:
        while self._entries:
            key, (until_s, _) = next(iter(self._entries.items()))
            if until_s > self._clock() and self._num_bytes <= self._max_bytes:
                return
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        self._num_bytes -= 0 if entry is None else len(entry[1])
        return entry is not None
