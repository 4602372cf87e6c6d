"""Command line > environment > YAML file > default, and no name that is not known."""

from pathlib import Path

import pytest
from pydantic import Field

from kvasir.common.config import ServiceConfig, Words


class Config(ServiceConfig, env_prefix="KVASIR_TRIAL_"):
    port: int = 1
    max_num_seqs: int = 2
    join: Words = Field(default=[])


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "trial.yaml"
    path.write_text("port: 10\nmax_num_seqs: 20\n")
    return path


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        Config.load(argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_nearer_source_wins(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.load([]).port == 1
    assert Config.load(["--config", str(yaml)]).port == 10
    monkeypatch.setenv("KVASIR_CONFIG", str(yaml))
    monkeypatch.setenv("KVASIR_TRIAL_PORT", "100")
    config = Config.load(["--max-num-seqs", "2000"])
    assert (config.port, config.max_num_seqs) == (100, 2000)


def test_unknown_names_are_errors_that_guess(
    yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unrecognized arguments: --max-num-seq" in refusal(["--max-num-seq", "4"], capsys)
    yaml.write_text("max_num_seq: 4\n")
    assert "did you mean max_num_seqs?" in refusal([f"--config={yaml}"], capsys)
    monkeypatch.setenv("KVASIR_TRIAL_PROT", "1")
    assert "did you mean KVASIR_TRIAL_PORT?" in refusal([], capsys)


class Demanding(ServiceConfig, env_prefix="KVASIR_TRIAL_"):
    model_dir: Path


def test_what_is_missing_is_named_as_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Demanding.load([])
    assert "--model-dir is wanted (or KVASIR_TRIAL_MODEL_DIR)" in capsys.readouterr().err


def test_wrong_values_and_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "port" in refusal(["--port", "eighty"], capsys)
    assert "does not exist" in refusal(["--config", str(tmp_path / "none.yaml")], capsys)
    assert "--config wants" in refusal(["--config"], capsys)


@pytest.mark.parametrize("value", ["a:1,b:2", '["a:1", "b:2"]', "a:1, b:2"])
def test_lists_in_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_TRIAL_JOIN", value)
    assert Config.load([]).join == ["a:1", "b:2"]
    assert Config.load(["--join", "c:3", "--join", "d:4"]).join == ["c:3", "d:4"]


def test_help_names_the_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        Config.load(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "--config FILE" in printed
    assert "KVASIR_CONFIG" in printed
