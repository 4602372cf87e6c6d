"""Blocks that are held for a receiver. Each has one reference, which is given back exactly once.

    grant --> leased --> free          when the transfer ends: released, aborted or expired
                 |  ^
          borrow |  | give_back        the transport is reading the block
                 v  |
              borrowed --> free        at its last give_back, if the transfer has ended meanwhile

Pure: no pool and no clock of its own. Methods return the blocks whose reference the caller has to give back.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey, TransferId

_NUM_ENDED_REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class LeasedBlock:
    key: BlockKey
    block_id: BlockId
    num_tokens: int
    num_borrowed: int = 0
    payload_bytes: list[int] = field(default_factory=list)  # size of each payload that is borrowed now


@dataclass(eq=False, slots=True)
class _Transfer:
    deadline_s: float
    blocks: dict[BlockKey, LeasedBlock] = field(default_factory=dict)
    has_ended: bool = False


class Leases:
    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._transfers: dict[TransferId, _Transfer] = {}
        # Remembered, so that blocks published after the end are not leased: a release may overtake the first block.
        self._ended: OrderedDict[TransferId, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return sum(len(transfer.blocks) for transfer in self._transfers.values())

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def has(self, transfer_id: TransferId) -> bool:
        """Whether some of the transfer's blocks are still held."""
        return transfer_id in self._transfers

    def borrowed(self, transfer_id: TransferId, key: BlockKey) -> LeasedBlock:
        """A block that is borrowed now."""
        return self._transfers[transfer_id].blocks[key]

    def grant(self, transfer_id: TransferId, blocks: Sequence[LeasedBlock]) -> list[BlockId]:
        """Lease the blocks. Returns those that were refused: the transfer has ended, or holds that key already."""
        transfer = self._transfers.get(transfer_id) or _Transfer(0.0)
        if transfer_id in self._ended or transfer.has_ended:
            return [block.block_id for block in blocks]
        self._transfers[transfer_id] = transfer
        refused = [block.block_id for block in blocks if transfer.blocks.setdefault(block.key, block) is not block]
        self.keep_alive(transfer_id)
        return refused

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> LeasedBlock | None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.has_ended or key not in transfer.blocks:
            return None
        self.keep_alive(transfer_id)
        block = transfer.blocks[key]
        block.num_borrowed += 1
        return block

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> list[BlockId]:
        transfer = self._transfers[transfer_id]
        block = transfer.blocks[key]
        if block.num_borrowed == 0:
            raise RuntimeError(f"block {block.block_id} of transfer {transfer_id} was given back, but not borrowed")
        block.num_borrowed -= 1
        return self._sweep(transfer_id) if transfer.has_ended else []

    def keep_alive(self, transfer_id: TransferId) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.deadline_s = self._clock() + self._lease_s

    def end(self, transfer_id: TransferId) -> list[BlockId]:
        """End a transfer. Returns the blocks that no transport is reading; `give_back` returns the others later.

        Ending twice, or before the first block, is fine.
        """
        self._ended[transfer_id] = None
        while len(self._ended) > _NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        transfer.has_ended = True
        return self._sweep(transfer_id)

    def expired(self) -> list[TransferId]:
        """Transfers whose lease is over. The caller ends them."""
        now = self._clock()
        return [i for i, transfer in self._transfers.items() if not transfer.has_ended and transfer.deadline_s <= now]

    def all_transfers(self) -> list[TransferId]:
        return list(self._transfers)

    def _sweep(self, transfer_id: TransferId) -> list[BlockId]:
        transfer = self._transfers[transfer_id]
        free = [block for block in transfer.blocks.values() if block.num_borrowed == 0]
        for block in free:
            del transfer.blocks[block.key]
        if not transfer.blocks:
            del self._transfers[transfer_id]
        return [block.block_id for block in free]
