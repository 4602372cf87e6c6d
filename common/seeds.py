"""Each sequence of a request has a seed of its own, a function of (the request's seed, its index)."""

from hashlib import sha256

_SEEDS = 1 << 64


def sequence_seed(seed: int, index: int) -> int:
    """Sequence 0 keeps the seed, so that n=1 and the first of n=4 are the same text."""
    if index == 0:
        return seed
    digest = sha256(b"kvasir-sequence" + (seed % _SEEDS).to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")
