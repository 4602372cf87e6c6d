import subprocess
import sys
from pathlib import Path

import pytest

from kvasir import __version__
from kvasir.cli.main import COMMANDS, main

SRC = Path(__file__).parents[3] / "src"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in [*COMMANDS, "version"])


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"kvasir {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("serv", "serve"), ("chta", "chat"), ("versoin", "version")])
def test_a_typo_is_answered_with_what_was_meant(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    assert f"unknown command '{typed}'; did you mean {meant}?" in capsys.readouterr().err


def test_a_command_without_likeness(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy"]) == 2
    assert "unknown command 'xyzzy'\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "model"])
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"kvasir {command}" in capsys.readouterr().out


def test_bench_has_commands_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["bench", "serv"]) == 2
    assert "unknown command 'serv'" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from kvasir.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    assert not {"torch", "numpy", "grpc", "pydantic", "aiohttp"} & set(
        printed.replace("'", " ").replace(",", " ").split()
    )
