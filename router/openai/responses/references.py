"""Items of stored responses that a client refers to by their ids, in place of sending them again."""

import re
from collections.abc import Sequence

import orjson

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import NotFound
from kvasir.router.openai.responses.items import Item
from kvasir.router.openai.responses.store import ResponseStore, StoredResponse

_MAX_RESPONSES = 128  # that the items of one request are of
_MAX_BYTES = 32 << 20  # of these items together, as JSON: a reference is short, what it stands for may be long
_RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"[a-z]{1,16}_([0-9a-f]{32})_(?:in)?[0-9]{1,5}")


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Follows from the response's own id: whoever goes on with the response goes on with the same, and whoever knows
    the item's finds the response."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE_PREFIX)}_{place}"


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """Those of a response's input."""
    return [
        {**item, "type": item.get("type") or "message", "id": item.get("id") or item_id("item", response_id, f"in{at}")}
        for at, item in enumerate(items)
    ]


async def with_referenced(items: Sequence[Item], store: ResponseStore, owner: str) -> list[Item]:
    """Each reference is the item itself. Raises NotFound for what is not there, InvalidRequest for what is too much,
    and StoreUnavailable."""
    known: dict[str, dict[str, Item]] = {}
    found: list[Item] = []
    num_bytes_left = _MAX_BYTES
    for at, item in enumerate(items):
        wanted = item.get("id")
        if _is_reference(item):
            if not isinstance(wanted, str):
                raise _not_a_string(at)
            found.append(await _referenced(wanted, known, store, owner))
            num_bytes_left -= len(orjson.dumps(found[-1]))
            if num_bytes_left < 0:
                message = f"the items that 'input' refers to have more than {_MAX_BYTES} bytes together"
                raise InvalidRequest(message, "input", "context_length_exceeded")
        elif wanted is None or isinstance(wanted, str):
            found.append(item)
        else:
            raise _not_a_string(at)
    return found


async def _referenced(wanted: str, known: dict[str, dict[str, Item]], store: ResponseStore, owner: str) -> Item:
    match = _ITEM_ID.fullmatch(wanted)
    if match is None:
        raise _not_found(wanted)
    response_id = _RESPONSE_PREFIX + match[1]
    if response_id not in known:
        if len(known) == _MAX_RESPONSES:
            message = f"'input' refers to items of more than {_MAX_RESPONSES} responses"
            raise InvalidRequest(message, "input", "invalid_value")
        stored = await store.get(owner, response_id)
        known[response_id] = {} if stored is None else _items_of(stored)
    if wanted not in known[response_id]:
        raise _not_found(wanted)
    return known[response_id][wanted]


def _is_reference(item: Item) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _items_of(stored: StoredResponse) -> dict[str, Item]:
    """By id; an output's is its own."""
    return {item["id"]: item for item in (*stored.input_items, *stored.response["output"])}


def _not_found(wanted: str) -> NotFound:
    return NotFound(
        f"Item with id {wanted[:80]!r} not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input.",
        "input",
    )


def _not_a_string(at: int) -> InvalidRequest:
    return InvalidRequest(f"'input[{at}].id' must be a string", f"input[{at}].id", "invalid_type")
