"""For which CPU the loops are compiled, and where their code is kept."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

from kvasir.kernels.cpu import compiling

_ONE_MORE = """
from kvasir.kernels.cpu.compiling import compiled

@compiled
def one_more(x):
    return x + 1

print(one_more(41))
"""


def test_loops_are_compiled_where_they_cannot_be_kept(tmp_path: Path) -> None:
    """A user without a home that can be written to, and code that cannot be: numba gave up."""
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    done = _python(_ONE_MORE, XDG_CACHE_HOME=str(nowhere))
    assert done.stdout == "42\n"
    assert "compiled at each start" in done.stderr


def test_what_is_kept_belongs_to_this_version_of_the_code(tmp_path: Path) -> None:
    """Where a folder was chosen, an update went on with what had been compiled from helpers since changed."""
    here = Path(compiling.__file__).parent
    sources = sorted((*here.parent.glob("*.py"), *here.glob("*.py")))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    code = "from kvasir.kernels.cpu import choice; import numba; print(numba.config.CACHE_DIR)"
    chosen, default = tmp_path / "chosen", tmp_path / "default"
    for own, base in (("NUMBA_CACHE_DIR", chosen), ("XDG_CACHE_HOME", default / "kvasir")):
        folder = base / "compiled" / version
        done = _python(code, **{own: str(chosen if own == "NUMBA_CACHE_DIR" else default)})
        assert done.stdout == f"{folder}\n"
        kept = {path.name.partition("-")[0] for path in folder.rglob("*.nbi")}
        assert kept == {"choice.choose"}, "a loop is kept with its helpers, which have no files of their own"


def test_what_earlier_versions_left_behind_goes(tmp_path: Path) -> None:
    versions = tmp_path / "compiled"
    unused, recent, not_ours = (versions / name for name in ("0123456789abcdef", "fedcba9876543210", "mine"))
    for folder in (unused, recent, not_ours):
        folder.mkdir(parents=True)
        (folder / "code.nbc").write_text("")
    for folder in (unused, not_ours):
        os.utime(folder, (0, 0))
    done = _python("import kvasir.kernels.cpu.compiling", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stderr == ""
    assert [folder.exists() for folder in (unused, recent, not_ours)] == [False, True, True]


def test_loops_can_be_compiled_for_a_lesser_cpu() -> None:
    code = "from kvasir.kernels.cpu.panel_tile import PANEL, ROWS; print(PANEL, ROWS[-1])"
    assert _python(code, NUMBA_CPU_FEATURES="+avx2,+fma,+f16c").stdout == "16 6\n"
    assert _python(code, NUMBA_CPU_FEATURES="+avx2,+avx512f").stdout == "32 12\n"
    code = "from kvasir.kernels.cpu.panel_tile import CONVERTS_FLOAT16; print(CONVERTS_FLOAT16)"
    is_x86 = platform.machine() in ("x86_64", "AMD64", "i686")
    assert _python(code, NUMBA_CPU_FEATURES="+avx2,+fma").stdout == f"{not is_x86}\n"


def _python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=400, check=True)
