"""Every reference is given back exactly once, and never while a transfer reads the block."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey, TransferId
from kvasir.kv_connector.leases import LeasedBlock, Leases

LEASE_S = 10
transfers = st.sampled_from(["a", "b", "c"]).map(TransferId)
keys = st.integers(0, 3).map(lambda n: BlockKey(bytes([n])))


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.leases = Leases(LEASE_S, lambda: self.now_s)
        self.num_granted = 0
        self.returned: Counter[BlockId] = Counter()
        self.borrowed: list[tuple[TransferId, BlockKey, BlockId]] = []

    def take_back(self, block_ids: Sequence[BlockId]) -> None:
        self.returned.update(block_ids)
        assert not {block_id for _, _, block_id in self.borrowed} & set(block_ids)

    @rule(transfer=transfers, wanted=st.lists(keys, max_size=4))
    def grant(self, transfer: TransferId, wanted: list[BlockKey]) -> None:
        start, self.num_granted = self.num_granted, self.num_granted + len(wanted)
        blocks = [LeasedBlock(key, BlockId(start + i), 16) for i, key in enumerate(wanted)]
        self.take_back(self.leases.grant(transfer, blocks))

    @rule(transfer=transfers, key=keys)
    def borrow(self, transfer: TransferId, key: BlockKey) -> None:
        block = self.leases.borrow(transfer, key)
        if block is not None:
            assert self.returned[block.block_id] == 0
            self.borrowed.append((transfer, key, block.block_id))

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        transfer, key, _ = self.borrowed.pop(data.draw(st.integers(0, len(self.borrowed) - 1)))
        self.take_back(self.leases.give_back(transfer, key))

    @rule(transfer=transfers)
    def end(self, transfer: TransferId) -> None:
        self.take_back(self.leases.end(transfer))
        assert all(self.leases.borrow(transfer, BlockKey(bytes([n]))) is None for n in range(4))

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        for transfer in self.leases.expired():
            self.take_back(self.leases.end(transfer))

    @rule(transfer=transfers)
    def keep_alive(self, transfer: TransferId) -> None:
        self.leases.keep_alive(transfer)
        assert transfer not in self.leases.expired()

    @invariant()
    def each_block_is_leased_or_returned(self) -> None:
        assert all(count == 1 for count in self.returned.values())
        assert self.leases.num_blocks + self.returned.total() == self.num_granted

    def teardown(self) -> None:
        for transfer in self.leases.all_transfers():
            self.take_back(self.leases.end(transfer))
        while self.borrowed:
            transfer, key, _ = self.borrowed.pop()
            self.take_back(self.leases.give_back(transfer, key))
        assert self.leases.num_blocks == 0
        assert self.returned == {BlockId(n): 1 for n in range(self.num_granted)}


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_is_released_before_it_is_published_is_not_leased() -> None:
    leases = Leases(LEASE_S, lambda: 0.0)
    leases.end(TransferId("early"))
    assert leases.grant(TransferId("early"), [LeasedBlock(BlockKey(b"k"), BlockId(7), 16)]) == [BlockId(7)]
    assert leases.num_blocks == 0


def test_a_borrow_keeps_the_whole_transfer_alive() -> None:
    now_s = 0.0
    leases = Leases(LEASE_S, lambda: now_s)
    leases.grant(TransferId("t"), [LeasedBlock(BlockKey(bytes([n])), BlockId(n), 16) for n in range(2)])
    now_s = 9.0
    assert leases.borrow(TransferId("t"), BlockKey(b"\0")) is not None
    now_s = 18.0
    assert leases.expired() == []
    now_s = 19.0
    assert leases.expired() == [TransferId("t")]
