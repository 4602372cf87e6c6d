"""The torch references in the cases of the Triton kernels."""

from dataclasses import replace

import pytest
import torch

from kvasir.kernels import backend
from tests.unit.kernels.triton import test_decode_attention, test_prefill_attention, test_write_kv
from tests.unit.kernels.triton.attention_cases import Attention, check_decode, check_prefill

# On the CPU, fp32 is for the compiled loops, which have tests of their own.
DTYPE = torch.float16


@pytest.fixture(autouse=True)
def torch_backend(triton_backend: None) -> None:
    backend.use("torch")


@pytest.mark.parametrize("case", test_prefill_attention.CASES.values(), ids=test_prefill_attention.CASES)
def test_prefill_attention_of_torch(case: Attention, device: str) -> None:
    check_prefill(replace(case, dtype=DTYPE), device)


@pytest.mark.parametrize("case", test_decode_attention.CASES.values(), ids=test_decode_attention.CASES)
def test_decode_attention_of_torch(case: Attention, device: str) -> None:
    check_decode(replace(case, dtype=DTYPE), device)


@pytest.mark.parametrize("case", test_write_kv.CASES.values(), ids=test_write_kv.CASES)
def test_write_kv_of_torch(case: test_write_kv.Write, device: str) -> None:
    test_write_kv.check(replace(case, dtype=DTYPE), device)
