import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvasir.kernels.cpu import huge_pages

MIB = 1 << 20


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (1000, 9), (9, MIB)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_tensors_of_zeros_that_are_written_side_by_side(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [huge_pages.empty(shape, dtype) for _ in range(3)]
    for value, tensor in enumerate(tensors):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(value + 1)
    assert all(bool((tensor == value + 1).all()) for value, tensor in enumerate(tensors))


def test_large_tensors_begin_with_a_page_and_are_given_back() -> None:
    tensor = huge_pages.empty((64, MIB), torch.uint8)
    assert tensor.data_ptr() % (2 * MIB) == 0
    address, row = tensor.data_ptr(), tensor[5]
    del tensor
    gc.collect()
    assert _is_mapped(address), "a view still looks at it"
    del row
    gc.collect()
    assert not _is_mapped(address)


def test_small_tensors_share_a_mapping_and_more_of_them_get_another() -> None:
    tensors = [huge_pages.empty((MIB,), torch.uint8) for _ in range(80)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(set(addresses)) == 80
    assert 2 <= sum(later != first + MIB for first, later in pairwise(addresses)) <= 3


def test_tensors_made_in_inference_mode_leave_ordinary_ones_ordinary() -> None:
    with torch.inference_mode():
        for _ in range(40):
            huge_pages.empty((MIB,), torch.uint8)
    huge_pages.empty((MIB,), torch.uint8).fill_(1)


def _is_mapped(address: int) -> bool:
    spans = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)
