"""What the lab makes of its measurements, with contenders whose numbers are known."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvasir.bench.lab.cluster_cases import Figure
from kvasir.bench.lab.contenders import CASES, Tokens, steady_tokens_per_s
from kvasir.bench.lab.serving import compare, write_results
from kvasir.bench.timeline import Timeline


class Known:
    def __init__(self, name: str, prefill_s: float, tokens_per_s: float) -> None:
        self.name = name
        self.prompts: list[tuple[int, ...]] = []
        self._prefill_s = prefill_s
        self._tokens_per_s = tokens_per_s

    def prefill_s(self, prompt: Tokens) -> float:
        self.prompts.append(tuple(prompt))
        return self._prefill_s

    def decode_tokens_per_s(self, prompts: Sequence[Tokens], num_tokens: int) -> float:
        self.prompts += [tuple(prompt) for prompt in prompts]
        return self._tokens_per_s


def test_contenders_get_prompts_that_no_cache_has_seen() -> None:
    one, other = Known("transformers", 1.0, 10.0), Known("other", 1.0, 10.0)
    compare([one, other], num_rounds=2)
    everything = one.prompts + other.prompts
    assert len(set(everything)) == len(everything) == 2 * 3 * (1 + 1 + 16)


def test_results_hold_each_round_but_the_first_and_the_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = compare([Known("transformers", 0.2, 100.0), Known("faster", 0.1, 150.0)], num_rounds=3)
    figures = {"own": [Figure("hops", 4.25, "ms")], "shared": [Figure("hops", 5.0, "ms")]}
    write_results(tmp_path, samples, figures, num_rounds=3)
    written = json.loads((tmp_path / "serving.json").read_text())
    assert written["comparisons"][CASES[0].name]["faster"] == [100.0] * 3, "in milliseconds"
    table = (tmp_path / "serving.md").read_text()
    assert "| prefill of 512 tokens | faster | 100.0 ms | 100.0 | 100.0 | 2.00 |" in table
    assert "| decode, 16 at once | faster | 150.0 tokens/s | 150.0 | 150.0 | 1.50 |" in table
    assert "| hops | 4.2 ms | 5.0 ms |" in table
    assert table in capsys.readouterr().out


def test_the_steady_rate_counts_only_while_all_run() -> None:
    early = Timeline(sent_s=0.0, arrivals_s=(1.0, 2.0, 3.0, 4.0), num_output_tokens=4)
    late = Timeline(sent_s=0.0, arrivals_s=(2.0, 3.0, 4.0, 5.0), num_output_tokens=8)
    # Between 2.0 and 4.0: two chunks of one token, two chunks of two.
    assert steady_tokens_per_s([early, late]) == pytest.approx((2 + 4) / 2.0)


def test_requests_that_never_ran_together_have_no_steady_rate() -> None:
    one, other = (Timeline(sent_s=0.0, arrivals_s=(at, at + 1.0), num_output_tokens=2) for at in (1.0, 2.0))
    with pytest.raises(ValueError, match="too short"):
        steady_tokens_per_s([one, other])
