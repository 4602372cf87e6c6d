"""Nodes and requests made up for the tests of policies, and what is chosen among them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.costs import LocalPrefill
from kvasir.router.policy import (
    Rules,
    choose,
    prefix_aware,
)
from kvasir.router.views import Need, NodeView

RULES = Rules(prefix_aware, LocalPrefill())
APART = Rules(prefix_aware, LocalPrefill(max_uncached_tokens=0))
NODE = NodeView(
    address="",
    connector="tcp",
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    num_total_blocks=1000,
    max_tokens_held=16000,
    num_free_blocks=1000,
    num_seats_taken=0,
    num_queued_tokens=0,
    prefill_speed=PrefillSpeed(token_s=0.001),
    decode_step_s=0.020,
    block_fetch_s=0.001,
)


def node(address: str, **changes: Any) -> NodeView:
    return replace(NODE, address=address, **changes)


def need(num_tokens: int = 1600, **fields: Any) -> Need:
    return Need(num_tokens=num_tokens, max_num_tokens=num_tokens + 100, **fields)


def chosen(
    held: Mapping[str, int],
    prefill: list[NodeView],
    decode: list[NodeView],
    *,
    rules: Rules = RULES,
    wants: Need | None = None,
    last: tuple[str, str] = ("", ""),
) -> tuple[str, str | None, str]:
    choice = choose(wants or need(), prefill, decode, rules, lambda address: held.get(address, 0), *last)
    assert choice is not None
    return choice.decode.address, choice.prefill.address if choice.prefill else None, choice.why_local
