from pathlib import Path

import pytest

from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.quantization import WeightLab, with_noise
from tests.unit.engine.checkpoints import save_checkpoint

PROMPTS = [list(range(3, 40)), [5, 6, 7] * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, initializer_range=0.1, max_position_embeddings=256)
    return directory


def test_fewer_bits_are_further_off(model: Path, tmp_path: Path) -> None:
    for directory in (model, with_noise(model, 0.01, tmp_path)):
        found = WeightLab(directory, 64).measure_quality(PROMPTS)
        num_positions = sum(map(len, PROMPTS))
        assert {len(quality.kls) for quality in found.values()} == {num_positions}
        assert found["none"].num_equal == num_positions
        assert not any(found["none"].kls)
        divergences = [sum(found[way].kls) for way in ("none", "fp16", "int8", "int4")]
        assert divergences == sorted(divergences)
        assert divergences[3] > 10 * divergences[2] > 0
        for activations_too, weights_alone in (("w8a8_int8", "int8"), ("w4a8_int8", "int4")):
            assert sum(found[activations_too].kls) > sum(found[weights_alone].kls)


def test_noise_is_relative(model: Path, tmp_path: Path) -> None:
    plain, noisy = WeightLab(model, 64), WeightLab(with_noise(model, 0.01, tmp_path), 64)
    assert plain.measure_quality(PROMPTS)["int8"].kls != noisy.measure_quality(PROMPTS)["int8"].kls


def test_every_way_is_timed_in_every_round(model: Path) -> None:
    seconds = WeightLab(model, 64).measure_speed(2, Quiet())
    ways = ("none", "fp16", "int8", "w8a8_int8", "int4", "w4a8_int8")
    assert {(way, num_seqs) for way in ways for num_seqs in (1, 8, 32)} == seconds.keys()
    assert {len(each) for each in seconds.values()} == {2}
