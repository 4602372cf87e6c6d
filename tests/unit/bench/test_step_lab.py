import json
from pathlib import Path

import pytest

from kvasir.bench.lab import step
from kvasir.bench.lab.step_report import Case, Floors, Measured, Work, floor_s, write_results
from kvasir.engine.models import read_model_config
from tests.unit.engine.checkpoints import save_checkpoint

WORK = Work(layer_weights=1000, head_weights=500, kv_bytes_of_a_token=10.0, attention_width=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, max_position_embeddings=256)
    return directory


@pytest.mark.parametrize(
    ("form", "expected"), [("fp32", 6000), ("fp16", 3000), ("int8", 1593.75), ("w8a8", 1593.75), ("w4a8", 1156.25)]
)  # fmt: skip
def test_floor_of_reading(form: str, expected: float) -> None:
    """1,500 weights, and keys and values of 2 x 7 tokens"""
    assert floor_s(WORK, form, Floors(1.0, 1e9), Case(2, 7, 1)) == expected + 140


def test_floor_of_computing() -> None:
    """3 tokens after 2: 2 + 1, 2 + 2 and 2 + 3 keys; logits of the last alone"""
    assert floor_s(WORK, "fp32", Floors(1e9, 1.0), Case(1, 2, 3)) == 2 * (3 * 1000 + 500) + 4 * 12 * 4
    assert floor_s(WORK, "fp32", Floors(1e9, 2.0), Case(8, 0, 1)) == 8 * (2 * 1500 + 4 * 1 * 4) / 2


def test_weights_are_counted_as_they_are_stored(model: Path) -> None:
    config = read_model_config(model)
    work = Work.of(config, 1.0)
    of_layer = 48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80
    assert (work.layer_weights, work.head_weights) == (3 * of_layer, 48 * 96)
    assert work.attention_width == 3 * 4 * 16


def test_another_run_replaces_what_it_measures_and_keeps_the_rest(tmp_path: Path) -> None:
    floors = Floors(30e9, 150e9)

    def row(form: str, step_s: float) -> Measured:
        return Measured("decode, 1 with 128 tokens each", form, step_s, 0.018, floors)

    write_results(tmp_path, {"cores": 2}, [row("fp32", 0.024), row("fp16", 0.03)], [])
    text = write_results(tmp_path, {"cores": 2}, [row("fp32", 0.02)], [])
    assert "| decode, 1 with 128 tokens each | fp32 | 20.0 | 18.0 | 0.90 | 30.0 | 150 |" in text
    assert "| fp16 | 30.0 | 18.0 | 0.60 |" in text
    assert "0.75" not in text
    assert text == (tmp_path / "step.md").read_text()


def test_what_was_written_about_the_figures_stays(tmp_path: Path) -> None:
    write_results(tmp_path, {}, [], [])
    file = tmp_path / "step.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"words": ["In plain words."]}))
    for _ in range(2):
        assert write_results(tmp_path, {}, [], []).endswith("\nIn plain words.")


def test_a_run_measures_every_form_and_where_steps_go(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "DECODES", (Case(2, 17, 1),))
    monkeypatch.setattr(step, "PREFILLS", (Case(1, 0, 20),))
    looks = iter([Floors(1e9, 1e9), Floors(20e9, 170e9), Floors(30e9, 150e9), Floors(90e9, 110e9)] * 2)
    monkeypatch.setattr(step.Yardstick, "measure", lambda self: next(looks))
    options = ["--model", str(model), "--weights", "fp32", "int8", "--rounds", "3", "--output", str(tmp_path)]
    assert step.main(options) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    cases = {"decode, 2 with 17 tokens each", "prefill, 20 tokens"}
    assert {(one["case"], one["form"]) for one in found["measured"]} == {
        (c, f) for c in cases for f in ("fp32", "int8")
    }
    assert all(one["step_s"] > 0 for one in found["measured"])
    # Medians of each; the first round does not count.
    assert all(one["floors"] == {"bytes_per_s": 30e9, "flop_per_s": 150e9} for one in found["measured"])
    assert [one["form"] for one in found["profiles"]] == ["fp32", "fp32, drawn", "int8", "int8, drawn"]
    for one in found["profiles"]:
        assert min(one["parts_ms"].values()) > 0
        assert 0 < one["share_of_all_but_loops"] < 1
    assert "| Python | not the loops |" in (tmp_path / "step.md").read_text()
