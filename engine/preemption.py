"""Out of blocks: who gives way, and what it costs him.

A preempted request is computed again from its first token that the prefix cache has lost by then. Its output does not
change, since a token's random number depends on its position alone.
"""

from collections.abc import Sequence

from kvasir.engine.block_tables import BlockTables
from kvasir.engine.request import Phase, Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The lowest priority; among equals, the last come."""
    return max(running, key=lambda request: request.order)


def preempt(request: Request, tables: BlockTables) -> None:
    """Back to owning nothing. What it still awaited has come: only RUNNING requests are preempted."""
    tables.release(request)
    request.phase = Phase.WAITING
    request.num_awaited_tokens = 0
    request.num_preemptions += 1
