"""Items of stored responses that a client refers to by their ids, in place of sending them again."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import orjson

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import NotFound, wrong_type
from kvasir.router.openai.responses.items import Item
from kvasir.router.openai.responses.store import ResponseStore

_MAX_RESPONSES = 128  # that the items of one request are of
_MAX_BYTES = 32 << 20  # read of the store, and of items: a reference is short, what it stands for may be long
_RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"[a-z]{1,16}_([0-9a-f]{32})_(?:in)?[0-9]{1,5}")


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Follows from the response's own id: whoever goes on with the response goes on with the same, and whoever knows
    the item's finds the response."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE_PREFIX)}_{place}"


def as_shown(items: Sequence[Item], response_id: str) -> list[Item]:
    """Those of a response's input as they are told of: with ids, and all texts in parts."""
    return [_shown(item, item_id("item", response_id, f"in{at}")) for at, item in enumerate(items)]


def _shown(item: Item, new_id: str) -> Item:
    kind = item.get("type") or "message"
    shown = {**item, "type": kind, "id": item.get("id") or new_id}
    if kind == "reasoning":
        return shown | {"summary": item.get("summary") or []}
    shown["status"] = item.get("status") or "completed"
    if kind == "message":
        content = item.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown["content"] = [_shown_part(part, item["role"]) for part in parts]
    return shown


def _shown_part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    return {"annotations": [], **part, "type": "output_text"} if role == "assistant" else {**part, "type": "input_text"}


async def with_referenced(items: Sequence[Item], store: ResponseStore, owner: str) -> list[Item]:
    """Each reference is the item itself. Raises NotFound for what is not there, InvalidRequest for what is too much,
    and StoreUnavailable."""
    known = _Known(store, owner)
    found: list[Item] = []
    for at, item in enumerate(items):
        wanted, is_reference = item.get("id"), _is_reference(item)
        if not isinstance(wanted, str) and (is_reference or wanted is not None):
            raise wrong_type(f"input[{at}].id", "a string")
        found.append(await known.item(str(wanted)) if is_reference else item)
    return found


class _Known:
    """What has been read of the store for one request."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._items: dict[str, dict[str, Item]] = {}  # by the response that they are of, and their ids
        self._num_bytes_left = _MAX_BYTES

    async def item(self, wanted: str) -> Item:
        match = _ITEM_ID.fullmatch(wanted)
        if match is None:
            raise _not_found(wanted)
        response_id = _RESPONSE_PREFIX + match[1]
        if response_id not in self._items:
            self._items[response_id] = await self._read(response_id)
        if wanted not in self._items[response_id]:
            raise _not_found(wanted)
        found = self._items[response_id][wanted]
        self._take(len(orjson.dumps(found)))
        return found

    async def _read(self, response_id: str) -> dict[str, Item]:
        if len(self._items) == _MAX_RESPONSES:
            message = f"'input' refers to items of more than {_MAX_RESPONSES} responses"
            raise InvalidRequest(message, "input", "invalid_value")
        stored = await self._store.get(self._owner, response_id)
        if stored is None:
            return {}
        self._take(stored.num_bytes_of_items)
        await asyncio.sleep(0)  # others have waited while the one before was read
        return {item["id"]: item for item in (*stored.input_items, *stored.response["output"])}

    def _take(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes
        if self._num_bytes_left < 0:
            message = f"the responses and items that 'input' refers to have more than {_MAX_BYTES} bytes together"
            raise InvalidRequest(message, "input", "context_length_exceeded")


def _is_reference(item: Item) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _not_found(wanted: str) -> NotFound:
    return NotFound(
        f"Item with id {wanted[:80]!r} not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input.",
        "input",
    )
