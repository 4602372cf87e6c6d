from kvasir.common.seeds import sequence_seed


def test_seeds_of_sequences_are_fixed_and_differ() -> None:
    """A part of the wire: another implementation must derive the same."""
    assert sequence_seed(42, 0) == 42
    assert sequence_seed(42, 1) == 18064800584149850150
    assert len({sequence_seed(seed, i) for seed in range(10) for i in range(10)}) == 100
