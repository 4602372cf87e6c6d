"""What killed routers leave behind, and who removes it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvasir.router.workers.folder import own_folder

HOLD = """
import sys
from kvasir.router.workers.folder import own_folder
with own_folder() as folder:
    (folder / "hub").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_only_its_user_may_enter_and_it_goes_with_the_router(temporary: Path) -> None:
    with own_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "hub").write_text("")
    assert list(temporary.iterdir()) == []


def test_the_next_router_removes_what_a_killed_one_left_and_nothing_else(temporary: Path) -> None:
    elsewhere, link = temporary / "elsewhere", temporary / "kvasir-router-link"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    link.symlink_to(elsewhere)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = Path(os.fsdecode(other.stdout.readline().strip()))
        with own_folder():
            assert (theirs / "hub").exists(), "its router is alive"
        other.kill()
        other.wait()
        assert theirs.exists()
        with own_folder() as ours:
            assert {one.name for one in temporary.iterdir()} == {ours.name, "elsewhere", link.name}
    assert (elsewhere / "file").exists()
