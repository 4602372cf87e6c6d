"""Sampling all rows at once gives what sampling row by row gives, drafts and all; on the kernel's torch reference."""

from typing import Any

import numpy as np
import pytest
import torch

from kvasir.engine.cuda_sampler import sample_on_device
from kvasir.engine.cuda_upload import upload_in_one_copy
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import sample
from kvasir.engine.sampling_params import SamplingParams

VOCAB = 50


def request(name: str, outputs: list[int] | None = None, **params: Any) -> Request:
    return Request(
        request_id=RequestId(name), prompt_token_ids=[3, 1, 4], output_token_ids=outputs or [],
        sampling=SamplingParams(**params),
    )  # fmt: skip


def logits_for(best: list[int]) -> torch.Tensor:
    logits = torch.randn(len(best), VOCAB, generator=torch.Generator().manual_seed(1))
    logits[range(len(best)), best] += 20
    return logits


def test_as_row_by_row() -> None:
    requests = [
        request("greedy"),
        request("seeded", temperature=1.5, seed=11),
        request("scored", logprobs=2),
        request("cut", [7], temperature=3.0, top_k=5, top_p=0.8, seed=(1 << 63) + 5),
        request("penalised", [8, 8], repetition_penalty=40.0, frequency_penalty=9.0),
        request("biased", logit_bias=((9, 100.0),)),
        request("early", min_tokens=2, stop_token_ids=frozenset({6})),
        request("choosing", allowed_token_ids=(2, 30)),
        request("drafted", [5], temperature=0.5, seed=2),
    ]
    drafts = {RequestId("drafted"): [9, 10, 12]}
    logits = logits_for([1, 2, 3, 4, 8, 6, 6, 7, 9, 10, 11, 12])
    expected = sample(logits, requests, {}, drafts)
    assert expected[-1].token_ids == (9, 10, 11), "two drafts are kept, and the third is not what is chosen"
    assert expected[2].logprobs
    assert sample_on_device(logits, requests, {}, drafts) == expected


@pytest.mark.parametrize("broken", range(3))
def test_a_row_that_is_not_finite(broken: int) -> None:
    """Of two requests: the first, the second, or the second behind a draft that is kept."""
    requests, drafts = [request("one"), request("two")], {RequestId("two"): [8]}
    logits = logits_for([7, 8, 9])
    logits[broken, 5] = torch.inf
    sampled = sample_on_device(logits, requests, {}, drafts)
    assert sampled == sample(logits, requests, {}, drafts)
    assert [one.is_finite for one in sampled] == [broken != 0, broken != 1]


def test_a_stop_token_ends_the_drafts() -> None:
    one = request("one", stop_token_ids=frozenset({8}))
    (sampled,) = sample_on_device(logits_for([8, 9]), [one], {}, {RequestId("one"): [8]})
    assert sampled.token_ids == (8,)


def test_only_requests_that_fall_back() -> None:
    logits = logits_for([4])
    (sampled,) = sample_on_device(logits, [request("one", logprobs=0)], {}, {})
    assert sampled.token_ids == (4,)
    assert len(sampled.logprobs) == 1


def test_arrays_of_any_shape_go_up_in_one_piece() -> None:
    arrays = [
        np.arange(3), np.zeros(0, np.int64), np.arange(6, dtype=np.int32).reshape(2, 3)[:, :2],
        np.array([1.5], np.float32), np.array([[1], [2]], "<i4"),
    ]  # fmt: skip
    tensors = upload_in_one_copy(arrays, torch.device("cpu"))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.data_ptr() % 16 == tensors[0].data_ptr() % 16 for tensor in tensors if tensor.numel())
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
