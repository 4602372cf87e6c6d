"""Whether a prefill node takes another prompt. Pure."""

from dataclasses import dataclass

MAX_LEASED_SHARE = 0.5  # of the cache, that others may take their time to fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What the node has accepted and holds already."""

    num_queued_tokens: int
    num_newcomer_blocks: int  # wanted by prompts that are accepted and not admitted yet
    num_leased_blocks: int
    num_free_blocks: int  # those that only the prefix cache holds are free
    num_total_blocks: int


def refusal(holds: Holdings, num_tokens: int, num_blocks: int, max_num_queued_tokens: int) -> str:
    """Why one more prompt is too much; empty if it is not.

    A single prompt is always taken, however long: whether it fits is the engine's question. Blocks that a prompt here
    will give up soon are worth waiting for; those that other nodes have not fetched yet are theirs to let go.
    """
    if holds.num_queued_tokens and holds.num_queued_tokens + num_tokens > max_num_queued_tokens:
        return f"{holds.num_queued_tokens} prompt tokens wait here; {num_tokens} more are too many"
    is_leased_out = holds.num_leased_blocks > MAX_LEASED_SHARE * holds.num_total_blocks
    num_wanted = holds.num_newcomer_blocks + num_blocks
    if is_leased_out and num_wanted > holds.num_free_blocks:
        held = f"{holds.num_leased_blocks} of {holds.num_total_blocks} blocks are held for other nodes"
        return f"{held}; {num_wanted} are wanted, {holds.num_free_blocks} are free"
    return ""
