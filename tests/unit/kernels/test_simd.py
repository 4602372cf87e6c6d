"""The compiled building blocks, called from Python."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvasir.kernels.cpu import simd
from kvasir.kernels.cpu.simd import exp2, multiply_add, tanh


def test_exp2_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-126, 0, 2001), -np.logspace(-9, 0, 100)]).astype(np.float32)
    got = np.array([exp2(value) for value in x], dtype=np.float64)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / exact) < 3e-7


def test_exp2_at_the_ends() -> None:
    assert exp2(np.float32(0)) == 1
    assert exp2(np.float32(-1)) == 0.5
    assert exp2(np.float32(-np.inf)) == np.float32(2.0**-126)
    assert np.isnan(exp2(np.float32(np.nan)))


def test_tanh_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-12, 12, 2001), np.logspace(-9, 0, 100), -np.logspace(-9, 0, 100)])
    x = np.append(x, 0).astype(np.float32)
    got = np.array([tanh(value) for value in x], dtype=np.float64)
    exact = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / np.maximum(np.abs(exact), 1e-30)) < 5e-7
    assert tanh(np.float32(np.inf)) == 1
    assert tanh(np.float32(-np.inf)) == -1
    assert np.isnan(tanh(np.float32(np.nan)))


def test_multiply_add() -> None:
    rng = np.random.default_rng(1)
    for rows, depth, columns in ((4, 1, 64), (8, 16, 64), (12, 70, 128)):
        a = rng.standard_normal((rows, depth), dtype=np.float32)
        b = rng.standard_normal((depth, columns), dtype=np.float32)
        c = rng.standard_normal((rows, columns), dtype=np.float32)
        expected = c + a @ b
        multiply_add(a, b, c)
        np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)


_ONE_MORE = """
from kvasir.kernels.cpu.simd import compiled

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
    sources = sorted(Path(simd.__file__).parent.glob("*.py"))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    code = "from kvasir.kernels.cpu import choice; import numba; print(numba.config.CACHE_DIR)"
    chosen, default = tmp_path / "chosen", tmp_path / "default"
    for own, base in (("NUMBA_CACHE_DIR", chosen), ("XDG_CACHE_HOME", default / "kvasir")):
        folder = base / "compiled" / version
        done = _python(code, **{own: str(chosen if own == "NUMBA_CACHE_DIR" else default)})
        assert done.stdout == f"{folder}\n"
        kept = {path.name.partition("-")[0] for path in folder.rglob("*.nbi")}
        assert kept == {"choice.choose"}, "a loop is kept with its helpers, which have no files of their own"


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
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=120, check=True)
