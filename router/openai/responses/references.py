"""Items of stored responses that a client refers to by their ids, in place of sending them again."""

import re
from collections.abc import Sequence

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import NotFound
from kvasir.router.openai.responses.items import Item
from kvasir.router.openai.responses.store import ResponseStore, StoredResponse

_MAX_RESPONSES = 128  # that the items of one request are of
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
    """Each reference is the item itself. Raises NotFound for what is not there, and StoreUnavailable."""
    known: dict[str, StoredResponse | None] = {}
    found: list[Item] = []
    for at, item in enumerate(items):
        if not _is_reference(item):
            found.append(item)
            continue
        wanted = item.get("id")
        if not isinstance(wanted, str):
            raise InvalidRequest(f"'input[{at}].id' must be a string", f"input[{at}].id", "invalid_type")
        match = _ITEM_ID.fullmatch(wanted)
        if match is None:
            raise _not_found(wanted)
        response_id = _RESPONSE_PREFIX + match[1]
        if response_id not in known:
            if len(known) == _MAX_RESPONSES:
                message = f"'input' refers to items of more than {_MAX_RESPONSES} responses"
                raise InvalidRequest(message, "input", "invalid_value")
            known[response_id] = await store.get(owner, response_id)
        found.append(_item_of(known[response_id], wanted))
    return found


def _is_reference(item: Item) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _item_of(stored: StoredResponse | None, wanted: str) -> Item:
    if stored is not None:
        for item in (*stored.response["output"], *stored.input_items):
            if item["id"] == wanted:
                return dict(item)
    raise _not_found(wanted)


def _not_found(wanted: str) -> NotFound:
    return NotFound(
        f"Item with id {wanted[:80]!r} not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input.",
        "input",
    )
