import asyncio
from dataclasses import dataclass, field

from kvasir.kv_connector.base import Ticket
from kvasir.kv_connector.incoming import IncomingTransfer
from kvasir.node.in_flight import InFlight


@dataclass(eq=False, kw_only=True)
class DecodeRequest(InFlight):
    ticket: Ticket | None = None  # None: the prompt is computed here
    transfer: IncomingTransfer | None = None  # from admission on
    num_published: int = 0  # what the sender's progress said before that
    is_committed: bool = False
    aborted_because: str | None = None
    first_missing: int = 0  # block, at admission
    patience: asyncio.TimerHandle | None = None
    fetched: set[int] = field(default_factory=set)  # full blocks that came from elsewhere
