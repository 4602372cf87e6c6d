"""The quality report's parts: what it holds codecs against, and what it makes of the numbers."""

from dataclasses import replace

import pytest

from kvasir.bench.lab.divergence import Divergence
from kvasir.bench.lab.kv_quality import Quality, measure_quality, num_equal, quality_table, speed_table
from kvasir.bench.lab.kv_quality_engine import CodecLab
from kvasir.bench.lab.kv_quality_speed import Speed, measure_speed
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.passages import Prompt, some_passages
from kvasir.kv_connector.testing import SMALL
from tests.unit.engine.checkpoints import save_checkpoint

LOSSY = ("fp16", "int8", "fp8")
PROMPTS = [list(range(3, 3 + length)) for length in (5, 16, 37)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> CodecLab:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory)
    return CodecLab(directory, num_blocks=32)


def test_blocks_that_went_through_an_exact_codec_change_nothing(lab: CodecLab) -> None:
    here = lab.generate_here(PROMPTS, 8)
    prefilled = lab.prefill(PROMPTS)
    assert [one.num_tokens for one in prefilled] == [[5], [16], [16, 16, 5]]
    assert [one.first_token for one in prefilled] == [tokens[0] for tokens in here]
    for codec in ("none", "lossless"):
        assert lab.generate_from(prefilled, codec, 8) == here


def test_logits_are_those_of_the_tokens_that_are_generated(lab: CodecLab) -> None:
    (here,) = lab.generate_here(PROMPTS[2:], 8)
    (prefilled,) = lab.prefill(PROMPTS[2:])
    exact = lab.next_token_logits(prefilled, "none", here[:-1])
    assert exact.argmax(-1).tolist() == here[1:]
    errors = [float((lab.next_token_logits(prefilled, codec, here[:-1]) - exact).abs().max()) for codec in LOSSY]
    assert 0 < errors[0] < errors[1] < errors[2] < 3, "of logits up to 8"


def test_lossy_codecs_are_seen_in_the_numbers_and_exact_ones_are_not(lab: CodecLab) -> None:
    qualities = measure_quality(lab, lab.prefill(PROMPTS), lab.generate_here(PROMPTS, 8))
    exact = qualities["none"]
    assert (exact.num_equal_prompts, exact.num_tokens_before_difference, exact.equal_tokens) == (3, 8.0, 1.0)
    assert (exact.divergence.equal_best, exact.divergence.largest_kl) == (1.0, 0.0)
    divergences = [qualities[codec].divergence for codec in ("fp16", "int8", "fp8")]
    assert 0 < divergences[0].mean_kl < divergences[1].mean_kl < divergences[2].mean_kl
    assert all(divergence.mean_kl <= divergence.largest_kl for divergence in divergences)


def test_equal_tokens_are_counted_from_the_front() -> None:
    assert [num_equal([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [9, 2, 3])] == [3, 1, 0]


def test_speed_is_measured_beside_a_copy() -> None:
    blocks = [bytes(range(256)) * (SMALL.bytes_per_block // 256)] * 4
    speeds = measure_speed(blocks, SMALL, LOSSY, 2, Quiet())
    assert list(speeds) == list(LOSSY)
    assert speeds["fp16"].size == pytest.approx(0.5, abs=0.01)
    assert all(min(speed.encode_ratio, speed.decode_ratio) > 0 for speed in speeds.values())


def test_where_a_codec_pays() -> None:
    """Half the size at 2 GB/s each way: 1 ns a byte in all, to save half a byte. Both take as long at 0.5 GB/s."""
    speed = Speed(size=0.5, encode_bytes_per_s=2e9, decode_bytes_per_s=2e9, encode_ratio=1.0, decode_ratio=1.0)
    assert speed.pays_below_bits_per_s == pytest.approx(4e9)
    assert replace(speed, size=1.0).pays_below_bits_per_s == 0


def test_tables_say_what_was_measured() -> None:
    prompts = [Prompt("README.md", False, (1, 2, 3)), Prompt("LICENSE", True, (4,) * 9)]
    quality = Quality(1, 6.5, 0.75, Divergence(7, [0.25, *[1e-3] * 7]))
    text = "\n".join(quality_table("tiny in fp32", prompts, 8, {"int8": quality}))
    assert "| int8 | 1 of 2 | 6.5 of 8 | 75.0% | 87.50% | 3.2e-02 | 2.5e-01 |" in text
    assert "2 prompts of 3 to 9 tokens" in text
    assert "1 of them chats, from:\nREADME.md, LICENSE" in text
    speed = Speed(size=0.5, encode_bytes_per_s=2e9, decode_bytes_per_s=4e9, encode_ratio=0.2, decode_ratio=0.4)
    assert "| fp16 | 50.0% | 2.00 | 0.20 | 4.00 | 0.40 | 5.3 |" in "\n".join(speed_table(2048, {"fp16": speed}))


def test_the_prompts_are_text_and_none_is_there_twice() -> None:
    passages = some_passages(24)
    assert len({passage for _, passage in passages}) == 24
    assert all(len(passage) > 100 for _, passage in passages)
