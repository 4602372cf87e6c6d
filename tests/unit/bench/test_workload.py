import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvasir.bench.workload import Prompt, RandomLengths, arrival_times_s, custom_prompts, fit_text, random_prompts


class MergingTokenizer:
    """One token a letter, except that `ab` is read as one: so written ids come back fewer."""

    plain_ids: Sequence[int] = range(4)
    _LETTERS = ("a", "b", "c", "ab")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._LETTERS[token] for token in token_ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            length = 2 if text.startswith("ab") else 1
            ids.append(self._LETTERS.index(text[:length]))
            text = text[length:]
        return ids


def num_tokens(prompt: Prompt) -> int:
    assert prompt.num_tokens is not None
    return prompt.num_tokens


def test_the_same_seed_gives_the_same_prompts() -> None:
    lengths = RandomLengths(input_len=20, output_len=5, range_ratio=0.5)
    first, again, other = (random_prompts(8, lengths, seed, MergingTokenizer()) for seed in (1, 1, 2))
    assert first == again != other


def test_lengths_are_exact_without_a_range() -> None:
    lengths = RandomLengths(input_len=64, output_len=7)
    for prompt in random_prompts(20, lengths, 0, MergingTokenizer()):
        assert isinstance(prompt.content, str)
        assert len(MergingTokenizer().encode(prompt.content)) == prompt.num_tokens == 64
        assert prompt.num_output_tokens == 7


def test_lengths_stay_within_the_range_and_use_it() -> None:
    lengths = RandomLengths(input_len=100, output_len=10, range_ratio=0.2)
    prompts = random_prompts(200, lengths, 0, MergingTokenizer(), as_ids=True)
    assert {prompt.num_output_tokens for prompt in prompts} == {8, 9, 10, 11, 12}
    inputs = [num_tokens(prompt) for prompt in prompts]
    assert min(inputs) in range(80, 90)
    assert max(inputs) in range(111, 121)
    assert all(len(prompt.content) == prompt.num_tokens for prompt in prompts)


def test_a_shared_prefix_begins_every_prompt() -> None:
    prompts = random_prompts(5, RandomLengths(input_len=4, prefix_len=6), 0, MergingTokenizer(), as_ids=True)
    assert len({prompt.content[:6] for prompt in prompts}) == 1
    assert len({prompt.content for prompt in prompts}) == 5
    assert {prompt.num_tokens for prompt in prompts} == {10}


def test_without_a_tokenizer_words_are_counted() -> None:
    prompts = random_prompts(3, RandomLengths(input_len=12, prefix_len=2), 0)
    assert all(isinstance(p.content, str) and len(p.content.split()) == 14 for p in prompts)
    assert {prompt.num_tokens for prompt in prompts} == {None}, "only the server can tell"


def test_fit_text_says_how_many_tokens_it_is_in_truth() -> None:
    text, count = fit_text([0, 1] * 10, MergingTokenizer(), random.Random(0))
    assert count == len(MergingTokenizer().encode(text))


@pytest.mark.parametrize("bad", [{"input_len": 0}, {"output_len": 0}, {"range_ratio": 1.0}, {"prefix_len": -1}])
def test_impossible_lengths_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        RandomLengths(**bad)


def test_custom_prompts_begin_again_when_there_are_too_few(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n\n{"prompt": [1, 2, 3], "output_tokens": 4}\n')
    hello = Prompt(content="hello", num_output_tokens=9)
    ids = Prompt(content=(1, 2, 3), num_output_tokens=4, num_tokens=3)
    assert custom_prompts(path, 3, default_output_len=9) == [hello, ids, hello]


@pytest.mark.parametrize("line", ["no json", '{"text": "x"}', '{"prompt": 5}', "[1]", '{"prompt": ["a"]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        custom_prompts(path, 2, 1)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        custom_prompts(path, 2, 1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times_s(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


def test_arrivals_end_at_the_time_that_the_rate_says() -> None:
    arrivals = arrival_times_s(50, request_rate=10.0, burstiness=1.0, rng=random.Random(0))
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(5.0)


def test_more_burstiness_is_more_even() -> None:
    def spread(burstiness: float) -> float:
        arrivals = arrival_times_s(500, 1.0, burstiness, random.Random(0))
        return statistics.pstdev(later - earlier for earlier, later in itertools.pairwise(arrivals))

    assert spread(0.2) > spread(1.0) > spread(20.0)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_impossible_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        arrival_times_s(3, rate, burstiness, random.Random(0))
