"""The report on `--kv-cache-dtype`: what its numbers are made of."""

from pathlib import Path

from kvasir.bench.lab.divergence import Divergence
from kvasir.bench.lab.kv_dtype import DtypeLab, as_table, measure_quality, measure_speed
from kvasir.bench.lab.machine import Quiet
from tests.unit.engine.checkpoints import save_checkpoint


def test_accuracy_and_speed_of_each_dtype(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    lab = DtypeLab(tmp_path, 40)
    qualities = measure_quality(lab, [list(range(3, 3 + length)) for length in (5, 16, 37)])
    assert (qualities["fp32"].equal_best, qualities["fp32"].largest_kl) == (1.0, 0.0)
    assert 0 < qualities["fp16"].mean_kl < qualities["int8"].mean_kl <= qualities["int8"].largest_kl
    times = measure_speed(lab, 40, 2, Quiet())
    assert len(times) == 3 * 2
    assert all(len(taken_s) == 2 for taken_s in times.values())
    assert len(as_table(lab.layouts, qualities, times)) == 2 + 3


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    lab, divergence = DtypeLab(tmp_path, 16), Divergence(1, [0.0, 2e-3])
    times = {
        ("fp32", "decode"): [1, 2, 4],
        ("fp32", "prefill"): [8, 8, 8],
        ("fp16", "decode"): [1, 1, 1],
        ("fp16", "prefill"): [4, 4, 4],
        ("int8", "decode"): [2, 4, 8],
        ("int8", "prefill"): [2, 2, 2],
    }
    *_, fp16, int8 = as_table(lab.layouts, dict.fromkeys(lab.layouts, divergence), times)
    assert "| 50.00% | 1.0e-03 | 2.0e-03 | 1000.0 | 0.50 | 4000 | 0.50 |" in fp16
    assert "| 4000.0 | 2.00 | 2000 | 0.25 |" in int8
