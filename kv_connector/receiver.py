"""The receiving half of a node: fetches wanted blocks as they are published, checks them, puts them into the cache."""

import time
from collections.abc import Callable, Sequence

from kvasir.common.errors import KVTransferError
from kvasir.common.own_time import Limit, OwnTime
from kvasir.kv_connector.base import BlockKey, BlockMemory, KVBlock, KVConnector, Ticket
from kvasir.kv_connector.costs import ComputeCost, Rates
from kvasir.kv_connector.fetching import OnBlock
from kvasir.kv_connector.forms import CODEC_NONE, stored_as
from kvasir.kv_connector.incoming import IncomingTransfer
from kvasir.kv_connector.landing import ReceiverParts
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.sources import FromPeer, FromStore, Source
from kvasir.kv_connector.store_guard import StoreGuard
from kvasir.kv_connector.stored import store_key


def _unknown(num_tokens: int) -> float | None:
    return None


class KVReceiver:
    """Starts transfers into one node's KV cache, by ticket or from a store.

    `compute_s(num_tokens)`, where a method takes it, is the time in seconds that computing so many tokens here would
    take. A transfer that turns out slower than that is given up, and the rest of its blocks is reported as missing.
    """

    def __init__(
        self,
        connector: KVConnector,
        memory: BlockMemory,
        kv_identity: bytes,
        settings: ConnectorSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: TransferMetrics | None = None,
    ) -> None:
        self.metrics = metrics or TransferMetrics()
        self._connector = connector
        self._settings = settings
        self._clock = OwnTime(clock)
        self._guard = StoreGuard(f"reading from {connector.name}", settings.store_backoff_s, clock, self.metrics)
        self.rates = Rates(memory.layout.bytes_per_block, settings.costs.forget_after_s, clock)
        self._parts = ReceiverParts(memory, kv_identity, settings, self._clock, self.metrics, self.rates)
        self._own_form = stored_as(CODEC_NONE, memory.layout)
        self._transfers: set[IncomingTransfer] = set()

    async def close(self) -> None:
        """Cancel all transfers. Call it before the sender's `close`, which closes the connector."""
        transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            await transfer.done()

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def num_outstanding_blocks(self) -> int:
        """Blocks that have been published, and have neither landed nor been given up."""
        return sum(transfer.num_outstanding for transfer in self._transfers)

    def start(
        self, ticket: Ticket, wanted: Sequence[KVBlock], on_block: OnBlock, compute_s: ComputeCost = _unknown
    ) -> IncomingTransfer:
        """Fetch these blocks of a ticket, each once `IncomingTransfer.progress` has said that it is published."""
        if self._connector.is_store:
            source: Source = FromStore(self._connector, self._guard, self._parts.layout, self._form(ticket.stored_as))
        else:
            source = FromPeer(self._connector, ticket)
        return self._track(IncomingTransfer(self._parts, source, wanted, on_block, compute_s))

    def fetch_stored(
        self, wanted: Sequence[KVBlock], on_block: OnBlock, compute_s: ComputeCost = _unknown
    ) -> IncomingTransfer:
        """Fetch blocks that `lookup` has found in a store, without a ticket: exact blocks of this node's dtype only."""
        if not self._connector.is_store:
            raise ValueError(f"{self._connector.name} is no store: its blocks need a ticket")
        source = FromStore(self._connector, self._guard, self._parts.layout, self._own_form)
        transfer = IncomingTransfer(self._parts, source, wanted, on_block, compute_s)
        transfer.progress(max((block.index + 1 for block in wanted), default=0), committed=True)
        return self._track(transfer)

    async def lookup(self, keys: Sequence[BlockKey], stored_as: str = "") -> int:
        """How many of the first keys, without a gap, a store has. 0 if there is no store, or if it does not answer.

        stored_as: the form that the ticket names; without a ticket, exact blocks of this node's dtype.
        """
        if not (self._connector.is_store and keys and self._guard.is_open):
            return 0
        names = [store_key(key, self._parts.layout, self._form(stored_as)) for key in keys]
        started_s = self._clock()
        try:
            with self._guard.attempt():
                async with Limit(self._clock, started_s + self._settings.lookup_timeout_s):
                    found = await self._connector.contains(names)
        except KVTransferError:
            return 0
        self.rates.of(self._connector.name).note_latency(self._clock() - started_s)
        return found.index(False) if False in found else len(found)

    def is_worth_fetching(self, num_blocks: int, compute_s: float | None) -> bool:
        """Whether so many blocks are likely to arrive from the store in less time than computing them would take."""
        rate = self.rates.of(self._connector.name).current
        if rate is None:
            return True
        fetch_s = rate.fetch_s(num_blocks * self._parts.layout.bytes_per_block)
        is_worth = self._settings.costs.is_worth_fetching(fetch_s, compute_s)
        self.metrics.declined += not is_worth
        return is_worth

    def _form(self, stored_as: str) -> str:
        """The form under which a ticket's blocks are stored."""
        return stored_as or self._own_form

    def _track(self, transfer: IncomingTransfer) -> IncomingTransfer:
        self._transfers.add(transfer)
        transfer.on_done(self._transfers.discard)
        return transfer
