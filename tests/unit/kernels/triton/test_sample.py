"""The device's choice against the host's: the same tokens, row by row, whatever a request wants."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import sample as sample_on_host
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.sampling_row import Mask, SamplingRow
from kvasir.engine.sampling_tensors import sampling_tensors
from kvasir.kernels.sample import process_reference, sample, sample_reference, uniform
from kvasir.kernels.triton import sample as kernel
from tests.unit.kernels.triton.poison import poison_new_memory

several = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
EDGE = 1e-5  # of the number drawn: nearer to the border of two tokens, either will do


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def on_device(params: list[SamplingParams], vocabulary: int, device: str, **history: Any) -> Any:
    rows = [
        SamplingRow(params=one, prompt=history.get("prompt", [0]), outputs=history.get("outputs", [])) for one in params
    ]
    return sampling_tensors(rows, vocabulary, torch.device(device))


def one_token(logits: list[float], device: str, **params: Any) -> int:
    tensors = on_device([SamplingParams(**params)], len(logits), device)
    return int(sample(torch.tensor([logits], device=device), tensors))


def spread_seeds() -> list[int]:
    """Their numbers for position 1 are about 1/16, 3/16, ... 15/16."""
    return sorted(range(400), key=lambda seed: uniform(seed, 1))[25::50]


def test_numbers_are_those_of_the_host_bit_by_bit(device: str) -> None:
    rng = random.Random(1)
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(300))]
    positions = [0, 1, 2**31, 7, 0, *(rng.getrandbits(rng.randrange(1, 40)) for _ in range(300))]
    as_int64 = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).to(device)
    numbers = kernel.uniform(as_int64, torch.tensor(positions, device=device)).tolist()
    assert numbers == [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_penalties_and_masks_make_of_each_logit_what_is_defined(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 150, generator=generator)
    allowed = (torch.rand(150, generator=generator) < 0.7).numpy()
    prompt, outputs = [*range(60), 149], [2, 60, 61, 61, 62, 62, 62]
    rows = [
        SamplingRow(params=one, prompt=prompt, outputs=outputs, allowed=allowed if mask else None)
        for one, mask in [
            (SamplingParams(repetition_penalty=1.3, presence_penalty=0.7), True),
            (SamplingParams(presence_penalty=-0.2, frequency_penalty=0.5), False),
            (SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.3, logit_bias=((7, -3.0),)), True),
        ]
    ]
    params = sampling_tensors(rows, 150, torch.device(device))
    processed = kernel.process(logits.to(device), params)
    expected = process_reference(logits, sampling_tensors(rows, 150, torch.device("cpu")))
    assert not torch.equal(expected.nan_to_num(), logits)
    torch.testing.assert_close(processed.cpu(), expected, rtol=1e-6, atol=1e-6)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 2, 7, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.01, 0.5, 0.9, 0.999]), min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1), repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]), frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([(), ((0, 3.0), (16, -100.0))]),
    allowed_token_ids=st.sampled_from([(), (3,), (1, 9, 15)]),
    bad_words=st.sampled_from([(), ((4,), (2, 5))]), min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([frozenset[int](), frozenset({6})]),
)  # fmt: skip


@several
@given(
    vocabulary=st.sampled_from([17, 63, 64, 65, 150]), params=st.lists(sampling_params, min_size=1, max_size=4),
    has_grammar=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    magnitude=st.sampled_from([1.0, 6.0]),
)  # fmt: skip
def test_any_row_gets_the_token_that_the_host_gives_it(
    vocabulary: int, params: list[SamplingParams], has_grammar: bool, dtype: torch.dtype, magnitude: float, device: str
) -> None:
    generator = torch.Generator().manual_seed(vocabulary + len(params))
    logits = (torch.randn(len(params), vocabulary, generator=generator) * magnitude).to(dtype)
    prompt, outputs = [1, 2, 2, 16, 5], [2, 5, 7, 7]
    may_come = torch.rand(vocabulary, generator=generator) < 0.5
    may_come[11] = True
    allowed = may_come.numpy() if has_grammar else None
    rows = [SamplingRow(params=one, prompt=prompt, outputs=outputs, allowed=allowed) for one in params]
    tensors = sampling_tensors(rows, vocabulary, torch.device(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_BLOCK_V", 64)
        tokens = sample(logits.to(device), tensors).tolist()
    by_reference = sample_reference(logits, sampling_tensors(rows, vocabulary, torch.device("cpu"))).tolist()
    for row, one in enumerate(params):
        expected = {host_token(logits[row], one, prompt, outputs, allowed)}
        assert by_reference[row] in expected or by_reference[row] == tokens[row]
        if tokens[row] not in expected:  # the number may have fallen beside an edge
            expected = near_tokens(logits[row : row + 1], rows[row], vocabulary)
        assert tokens[row] in expected


def host_token(logits: Tensor, params: SamplingParams, prompt: list[int], outputs: list[int], mask: Mask | None) -> int:
    request = Request(request_id=RequestId("r"), prompt_token_ids=prompt, output_token_ids=outputs, sampling=params)
    (sampled,) = sample_on_host(logits.float()[None], [request], {} if mask is None else {request.request_id: mask})
    return sampled.token_ids[0]


def near_tokens(logits: Tensor, row: SamplingRow, vocabulary: int) -> set[int]:
    """What the reference draws with its number moved by EDGE."""
    tensors = sampling_tensors([row], vocabulary, torch.device("cpu"))
    tokens = set()
    with pytest.MonkeyPatch.context() as patch:
        for moved in (-EDGE, EDGE):

            def number(seed: int, position: int, moved: float = moved) -> float:
                return min(max(uniform(seed, position) + moved, 0.0), 1 - 2**-53)

            patch.setattr("kvasir.kernels.sample.uniform", number)
            tokens.add(int(sample_reference(logits.cpu(), tensors)))
    return tokens


def test_ties_go_to_the_lowest_id_and_stay_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_BLOCK_V", 4)
    logits = [0.0, 5.0, 1.0, 4.0, 1.0, 5.0, 5.0, 4.0, 4.0]  # two of the best at one place of a block
    assert one_token(logits, device) == 1
    drawn = {one_token(logits, device, temperature=1.0, top_k=2, seed=seed) for seed in spread_seeds()}
    assert drawn == {1, 5, 6}, "all three are among the best two"
    assert {one_token(logits, device, temperature=1.0, top_p=0.01, seed=seed) for seed in spread_seeds()} == {1, 5, 6}


def test_tokens_that_weigh_the_same_share_the_numbers_between_0_and_1(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several blocks, each of which the draw has to pass by."""
    monkeypatch.setattr(kernel, "_BLOCK_V", 8)
    drawn = [one_token([2.5] * 40, device, temperature=0.3, seed=seed) for seed in range(40)]
    assert drawn == [int(uniform(seed, 1) * 40) for seed in range(40)]
    assert len({token // 8 for token in drawn}) == 5


def test_thresholds_hold_what_they_should(device: str) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()

    def drawn(**params: Any) -> set[int]:
        return {one_token(logits, device, temperature=1.0, seed=seed, **params) for seed in spread_seeds()}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=1) == {0}
    assert drawn(top_p=0.45) == {0}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(top_k=2, top_p=0.6) == {0}, "of the best two, the first has two thirds"
    assert drawn(min_p=0.4) == {0, 1}


def test_a_row_that_is_not_finite_gives_no_token_and_leaves_the_others_alone(device: str) -> None:
    logits = torch.zeros(5, 70, device=device)
    logits[:, 9] = 1
    logits[1, 3], logits[2, 69], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    params = [SamplingParams(temperature=0.0 if row == 0 else 1e-3) for row in range(5)]
    assert sample(logits, on_device(params, 70, device)).tolist() == [9, -1, -1, -1, 9]
    masked = [SamplingParams(temperature=one.temperature, allowed_token_ids=(9, 10)) for one in params]
    assert sample(logits, on_device(masked, 70, device)).tolist() == [9, -1, -1, -1, 9]


def test_the_rows_of_a_batch_do_not_matter_to_each_other(device: str) -> None:
    logits = torch.randn(6, 90, device=device)
    params = [SamplingParams(temperature=1.0, seed=row, top_p=0.9, frequency_penalty=0.1 * row) for row in range(6)]
    together = sample(logits, on_device(params, 90, device, outputs=[1, 1, 4])).tolist()
    alone = [
        int(sample(logits[row : row + 1], on_device([one], 90, device, outputs=[1, 1, 4])))
        for row, one in enumerate(params)
    ]
    assert together == alone


def test_no_rows(device: str) -> None:
    assert sample(torch.zeros(0, 40, device=device), on_device([], 40, device)).tolist() == []


def test_a_number_next_to_1_and_a_temperature_next_to_0(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weight on a few tokens among many without any: a draw never falls behind the last, or on none."""
    logits = [-1e4] * 100
    logits[30], logits[60] = 0.0, 0.0
    assert {one_token(logits, device, temperature=1.0, seed=seed) for seed in spread_seeds()} == {30, 60}
    assert one_token([0.0, 1.0, 1e-3], device, temperature=1e-38) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 262_144])
def test_full_shapes(vocabulary: int, device: str) -> None:
    """The host's tokens, but where a number falls within EDGE of a border."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(64, vocabulary, generator=generator) * 3
    rng = random.Random(vocabulary)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_k=rng.choice([0, 1, 50, 1000]),
            top_p=rng.choice([1.0, 0.5, 0.95]), min_p=rng.choice([0.0, 0.02]), seed=rng.getrandbits(64),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for _ in range(64)
    ]  # fmt: skip
    prompt, outputs = list(range(500)), [3, 3, 9]
    rows = [SamplingRow(params=one, prompt=prompt, outputs=outputs) for one in params]
    tokens = sample(logits.to(device), sampling_tensors(rows, vocabulary, torch.device(device))).tolist()
    for row, one in enumerate(params):
        if tokens[row] != host_token(logits[row], one, prompt, outputs, None):
            assert tokens[row] in near_tokens(logits[row : row + 1], rows[row], vocabulary)
