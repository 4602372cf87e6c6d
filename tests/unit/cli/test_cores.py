from itertools import chain, product

import pytest

from kvasir.cli.cores import (
    MAX_KV_BYTES,
    MIN_KV_BYTES,
    CoreShare,
    divide_cores,
    divide_kv_memory,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_cores", "num_prefill", "num_decode", "expected"),
    [
        (2, 1, 1, [CoreShare(1, (0,)), CoreShare(1, (1,))]),
        (3, 1, 1, [CoreShare(2, (0, 1)), CoreShare(1, (2,))]),
        (4, 1, 1, [CoreShare(2, (0, 1)), CoreShare(2, (2, 3))]),
        (4, 0, 1, [CoreShare(4, (0, 1, 2, 3))]),
        (5, 2, 1, [CoreShare(2, (0, 1)), CoreShare(2, (2, 3)), CoreShare(1, (4,))]),
        (2, 1, 2, [CoreShare(1)] * 3),
        (1, 1, 1, [CoreShare(1)] * 2),
    ],
)
def test_who_gets_what(num_cores: int, num_prefill: int, num_decode: int, expected: list[CoreShare]) -> None:
    assert divide_cores(range(num_cores), num_prefill, num_decode) == expected


def test_never_two_compute_threads_on_a_core_while_cores_last() -> None:
    for num_cores, num_prefill, num_decode in product(range(1, 20), range(5), range(1, 5)):
        shares = divide_cores(range(num_cores), num_prefill, num_decode)
        assert len(shares) == num_prefill + num_decode
        assert sum(share.num_threads for share in shares) == max(num_cores, len(shares))
        if num_cores >= len(shares):
            assert all(len(share.cpus) == share.num_threads for share in shares)
            assert sorted(chain.from_iterable(share.cpus for share in shares)) == list(range(num_cores))


def test_unpinned_shares_have_the_same_threads() -> None:
    assert divide_cores(range(3), 1, 1, pin=False) == [CoreShare(2), CoreShare(1)]


def test_the_cores_need_not_be_the_first() -> None:
    assert divide_cores([3, 7], 1, 1) == [CoreShare(1, (3,)), CoreShare(1, (7,))]


def test_kv_memory_is_what_the_weights_leave() -> None:
    # 10 GiB - 2 x 1 GiB of weights, half of it, for two.
    assert divide_kv_memory(10 * GIB, 1 * GIB, 2) == 2 * GIB
    assert divide_kv_memory(1000 * GIB, 1 * GIB, 2) == MAX_KV_BYTES
    assert divide_kv_memory(1 * GIB, 1 * GIB, 2) == MIN_KV_BYTES
