"""One row, one request: order of the steps, exactness of the draw, independence of rows."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampler import sample
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Sampled
from kvasir.kernels.choose import Draw, choose
from kvasir.kernels.sample import uniform

VOCAB = 50


def request(prompt: list[int] | None = None, outputs: list[int] | None = None, **params: Any) -> Request:
    return Request(
        request_id=RequestId("r"),
        prompt_token_ids=prompt or [1],
        output_token_ids=outputs or [],
        sampling=SamplingParams(**params),
    )


def logits_of(*values: float) -> Tensor:
    return torch.tensor([[*values]], dtype=torch.float32)


def token(logits: Tensor, one: Request) -> int:
    (sampled,) = sample(logits, [one])
    assert sampled.is_finite
    (token,) = sampled.token_ids
    return token


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    return int(choose(logits[None], [Draw(temperature, u, top_k, top_p, min_p)])[1][0])


def test_greedy_takes_the_best() -> None:
    assert token(logits_of(0, 3, 1), request()) == 1


def test_bias_bans_and_forces() -> None:
    logits = logits_of(0, 3, 1)
    assert token(logits, request(logit_bias=((1, -100.0),))) == 2
    assert token(logits, request(logit_bias=((0, 100.0),))) == 0
    assert logits.tolist() == [[0, 3, 1]], "the raw logits are left as they are"


def test_repetition_penalty_counts_prompt_and_output_once_a_token() -> None:
    # 4 / 2 < 2.5, but 4 / 2 ** 3 would be less than 1
    logits = logits_of(1, 4, 2.5, 1.9)
    assert token(logits, request([1, 1, 1], repetition_penalty=2.0)) == 2
    assert token(logits, request([1], [1, 1], repetition_penalty=2.0)) == 2
    assert token(logits, request([1, 2, 1], repetition_penalty=2.0)) == 1, "2 against 1.25 and 1.9"


def test_repetition_penalty_lowers_negative_logits() -> None:
    assert token(logits_of(-1, -1.5), request([0], repetition_penalty=2.0)) == 1


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_know_the_output_only(name: str) -> None:
    logits = logits_of(0, 3, 2)
    assert token(logits, request([1, 1, 1, 1], **{name: 2.0})) == 1
    assert token(logits, request([0], [1], **{name: 2.0})) == 2


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = logits_of(0, 3, 1)
    assert token(logits, request([0], [1, 1, 1], presence_penalty=1.5)) == 1
    assert token(logits, request([0], [1, 1, 1], frequency_penalty=1.5)) == 2


def test_allowed_tokens() -> None:
    assert token(logits_of(5, 4, 3, 2), request(allowed_token_ids=(2, 3))) == 2


def test_no_stop_token_before_min_tokens() -> None:
    logits = logits_of(5, 4, 3)
    stops: dict[str, Any] = {"stop_token_ids": frozenset({0, 1}), "min_tokens": 2}
    assert token(logits, request(outputs=[2], **stops)) == 2
    assert token(logits, request(outputs=[2, 2], **stops)) == 0


def test_bad_words_are_stopped_at_their_last_token() -> None:
    logits = logits_of(1, 5, 4, 3)
    words = ((2,), (0, 1))
    assert token(logits, request(bad_words=words)) == 1, "only 2 is bad so far"
    assert token(logits, request(outputs=[3, 0], bad_words=words)) == 3
    assert token(logits, request([0], [], bad_words=words)) == 1, "the prompt does not begin a bad word"


def test_bans_that_leave_nothing_give_way() -> None:
    stops = frozenset({1})
    assert token(logits_of(5, 4), request(allowed_token_ids=(1,), min_tokens=3, stop_token_ids=stops)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2] = 1
    logits[1, 0] = bad
    rows = [request(), request(temperature=1.0), request(logprobs=1)]
    first, broken, last = sample(logits, rows)
    assert broken == Sampled((), is_finite=False)
    assert (first.token_ids, last.token_ids) == ((2,), (2,))


def test_of_equal_ones_the_first_is_the_best() -> None:
    assert sample(logits_of(1, 3, 3, 2), [request()])[0].token_ids == (1,)


def test_the_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    probabilities = [0.1, 0.2, 0.3, 0.4]
    logits = torch.tensor(probabilities).log()
    edges = [0.0, 0.1, 0.3, 0.6, 1.0]
    for expected, (low, high) in enumerate(itertools.pairwise(edges)):
        for u in (low + 1e-5, (low + high) / 2, high - 1e-5):
            assert draw(logits, 1.0, 0, 1.0, 0.0, u) == expected
    assert draw(logits, 1.0, 0, 1.0, 0.0, 0.0) == 0
    assert draw(logits, 1.0, 0, 1.0, 0.0, math.nextafter(1, 0)) == 3


def distribution(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                 steps: int = 2000) -> list[float]:  # fmt: skip
    counts = [0] * len(logits)
    for i in range(steps):
        counts[draw(logits, temperature, top_k, top_p, min_p, (i + 0.5) / steps)] += 1
    return [count / steps for count in counts]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.72}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),  # of 9/9 that top-k left, 7/9 are enough
        ({"temperature": 0.5, "min_p": 0.5}, [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_what_is_cut_off(options: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log() + 3
    assert distribution(logits, **options) == pytest.approx(expected, abs=1e-3)


def test_top_p_over_more_tokens_than_are_looked_at_first() -> None:
    """Flat over 5,000 tokens: half of the weight needs 2,500, where 1,024 are tried first."""
    logits = torch.linspace(0, -1e-3, 5000)
    assert draw(logits, 1.0, 0, 0.5, 0.0, math.nextafter(1, 0)) == pytest.approx(2499, abs=3)


def test_very_low_temperature_is_greedy() -> None:
    assert distribution(torch.tensor([1.0, 1.001, 0.5]), temperature=1e-6, steps=50) == [0, 1, 0]


def test_rows_do_not_influence_each_other() -> None:
    """Each row alone, and among others that are plain, penalised and seeded, in both orders."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=generator) * 2
    rows = [
        request(temperature=0.9, seed=42),
        request(),
        request([3, 4], [5], repetition_penalty=1.7, temperature=1.0, seed=42),
        request(temperature=1.3, top_p=0.8, seed=7, logprobs=3),
        request([3], [9, 9], presence_penalty=2.0, frequency_penalty=1.0),
        request(temperature=0.7, top_k=5, min_p=0.1, seed=1),
    ]
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


def test_uniform_depends_on_seed_and_position_alone() -> None:
    """Fixed numbers: a node of another version must continue a stream with the same draws."""
    assert uniform(42, 10) == 0.35932711249237326
    assert uniform(2**64 - 1, 2**20) == 0.2938095247508019


def test_uniform_is_uniform() -> None:
    """Over positions of one seed and over seeds at one position: mean of 4,000 within 5 sigma of a half."""
    for draws in ([uniform(5, i) for i in range(4000)], [uniform(i, 5) for i in range(4000)]):
        assert sum(draws) / len(draws) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 4000))
        assert 0 <= min(draws) < max(draws) < 1
        assert len(set(draws)) == len(draws)
        neighbours = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(draws)) / len(draws)
        assert abs(neighbours) < 5 / 12 / math.sqrt(4000)


def test_the_position_is_the_number_of_tokens_before() -> None:
    """Prompt and output alike: a request that comes with its outputs so far goes on as if it had never moved."""
    logits = torch.zeros(1, VOCAB)
    params: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    assert token(logits, request([1, 2, 3], [4, 5], **params)) == token(logits, request([1, 2], [3, 4, 5], **params))
    tokens = {token(logits, request([1] * n, **params)) for n in range(1, 20)}
    assert len(tokens) > 5


def test_another_seed_is_another_draw() -> None:
    """Also where drafts are to be verified."""
    logits = torch.zeros(1, VOCAB)
    assert len({token(logits, request(temperature=1.0, seed=seed)) for seed in range(20)}) > 5
    drafts = {RequestId("r"): [0]}
    firsts = {sample(logits.repeat(2, 1), [request(temperature=1.0, seed=seed)], {}, drafts)[0] for seed in range(20)}
    assert len(firsts) > 5


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()[None]
    (sampled,) = sample(logits, [request(logprobs=2, logit_bias=((2, 50.0),), temperature=0.3)])
    (logprobs,) = sampled.logprobs
    assert sampled.token_ids == (2,)
    assert logprobs.rank == 3
    assert [token for token, _ in logprobs.entries] == [2, 1, 3]
    assert [math.exp(value) for _, value in logprobs.entries] == pytest.approx([0.2, 0.4, 0.3])


def test_logprobs_of_the_chosen_token_alone() -> None:
    (sampled,) = sample(logits_of(0, 1), [request(logprobs=0)])
    assert [token for token, _ in sampled.logprobs[0].entries] == [1]
    assert sampled.logprobs[0].rank == 1
    assert sample(logits_of(0, 1), [request()])[0].logprobs == ()
