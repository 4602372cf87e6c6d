"""A prompt that is computed on a prefill node, as far as it has come over to the decode node that goes on with it."""

from dataclasses import dataclass, field

from kvasir.proto import common_pb2
from kvasir.router.node_events import Progress

FirstTokens = tuple[tuple[int, ...], ...]  # of each sequence; none: to be sampled where the prompt is computed


@dataclass(eq=False, slots=True)
class Handover:
    """Its ticket is bound to no decode node: if one is lost before it has spoken, another takes the same."""

    ticket: common_pb2.Ticket
    num_sequences: int
    num_cached_tokens: int = 0  # that the prefill node did not have to compute
    progress: Progress | None = None  # the last
    is_fetched: bool = False  # the decode node has of the blocks what it will get
    first_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # that have come, by sequence

    @property
    def all_first(self) -> FirstTokens | None:
        """None: some have not come."""
        if len(self.first_tokens) < self.num_sequences:
            return None
        return tuple(self.first_tokens[sequence] for sequence in range(self.num_sequences))

    @property
    def outlives_sender(self) -> bool:
        """All blocks are in a store."""
        return not self.ticket.endpoints and self.progress is not None and self.progress.committed
