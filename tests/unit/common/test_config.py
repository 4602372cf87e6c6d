"""Command line > environment > YAML file > default, and no name that is not known."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator

from kvasir.common.addresses import split_address
from kvasir.common.config import Keys, ServiceConfig, Words
from kvasir.common.speculative_config import SpeculativeConfig


class Config(ServiceConfig, env_prefix="KVASIR_TRIAL_"):
    port: int = 1
    max_num_seqs: int = 2
    join: Words = Field(default=[])
    api_key: Keys = Field(default=[])
    length: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    more: dict[str, int] = Field(default={})

    @field_validator("join")
    @classmethod
    def _are_addresses(cls, join: list[str]) -> list[str]:
        for address in join:
            split_address(address)
        return join


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
    for argv in (["--max-num-seq", "4"], ["--max-num-seq=4"]):
        wanted = "error: unknown option --max-num-seq; did you mean --max-num-seqs? (--help lists them all)\n"
        assert refusal(argv, capsys) == wanted
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


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("--port eighty", "port: Input should be a valid integer, unable to parse string as an integer, got 'eighty'"),
        ("--port", "argument --port: expected one argument"),
        ("--join nonsense", "join: an address is host:port, got 'nonsense'"),
        ("--length 0", "length: Input should be greater than 0 or Input should be 'auto', got '0'"),
        ("--more one", "--more wants name=value"),
        ("--config", "--config wants the name of a YAML file"),
    ],
)
def test_wrong_values_are_one_line_each(argv: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(argv.split(), capsys) == f"error: {wanted}\n"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, " cannot be read: No such file or directory"),
        (b"port: 1\njoin: [a:1\n", ", line 3: expected ',' or ']', but got '<stream end>'"),
        (b"- port\n", " must hold options, one a line, as `name: value`"),
        (b"port", " must hold options, one a line, as `name: value`"),
        (b"port: \xff", " is no YAML: 'utf-8' codec can't decode byte 0xff in position 6: invalid start byte"),
        (b"port: \x07", " is no YAML: unacceptable character #x0007: special characters are not allowed"),
    ],
)
def test_files_that_cannot_be_used(
    content: bytes | None, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trial.yaml"
    if content is not None:
        path.write_bytes(content)
    assert refusal(["--config", str(path)], capsys) == f"error: config file {path}{wanted}\n"
    assert " cannot be read: Is a directory" in refusal(["--config", str(tmp_path)], capsys)


def test_every_wrong_option_of_a_file_is_told(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml.write_text("1: 2\nprot: 3\n")
    lines = refusal([f"--config={yaml}"], capsys).splitlines()
    assert lines == ["error: unknown option '1'", "error: unknown option 'prot'; did you mean port?"]
    yaml.write_text("")
    assert Config.load([f"--config={yaml}"]).port == 1


def test_a_key_that_was_not_set_lets_nobody_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Config.load(["--api-key", "a", "--api-key", "b"]).api_key == ["a", "b"]
    for nothing in ("", ",", ",,"):
        assert "an empty text is no key" in refusal(["--api-key", nothing], capsys)
    monkeypatch.setenv("KVASIR_TRIAL_API_KEY", "")
    assert "an empty text is no key" in refusal([], capsys)


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
    assert "KVASIR_TRIAL_LOG_LEVEL" in printed


class Helpful(ServiceConfig, env_prefix="KVASIR_TRIAL_"):
    """What it is."""

    name: str = Field(default="", description="Its name.")
    join: Words = Field(default=[], description="Whom to join.")
    more: dict[str, str] = Field(default={}, description="What else.")
    share: float = Field(default=0.5, description="How much.")
    length: Literal["auto"] | int | None = Field(default=None, description="How long.")
    kind: Literal["a", "b"] | None = Field(default="b", description="Which.")
    path: Path = Field(description="Where.")
    speculative_config: SpeculativeConfig | None = Field(default=None, description="Drafts.")


def test_help_has_no_types_of_python_and_no_defaults_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Helpful.load(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for option in (
        "--name TEXT Its name. --join TEXT,.. Whom to join. --more NAME=VALUE What else. --share X How much. (default:",
        "--length {auto,N} How long. --kind {a,b} Which. (default: b) --path PATH Where. (required)",
        "--speculative-config.method {ngram,draft_model}",
        "Tokens proposed to each request, at most. (required)",
        "speculative-config options: Drafts.",
    ):
        assert option in printed, option
    assert not [word for word in ("null", "list[", "dict[", "ifdef", "default: )") if word in printed]
    assert "KVASIR_CONFIG" in printed
