"""Every kernel becomes machine code, for GPUs that are not here, and that code has no fault that can be seen in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compile_kernels(folder: Path, *arguments: str, timeout_s: float) -> list[list[str]]:
    """-> the cells of each row of the table"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "kvasir.bench.lab.kernel_code", *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert ran.returncode == 0, ran.stderr
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in ran.stdout.splitlines()[2:]]


def check(rows: list[list[str]]) -> None:
    assert rows
    for launch, _kernel, _dtype, _gpu, registers, spills, shared, loads, *_ in rows:
        assert int(registers) <= 255, launch
        assert int(spills) == 0, launch
        assert int(shared.removesuffix(" KB")) <= 99, launch
        assert int(loads.partition(" + ")[0]) > 0, f"{launch} reads nothing 16 bytes at a time"


@pytest.mark.parametrize("arguments", [
    ["--only", "decode_attention, D 128, window", "--arch", "90", "--dtype", "bfloat16"],
    ["--only", "prefill_attention, D 64", "--arch", "80", "--dtype", "float16"],
], ids=lambda arguments: arguments[1])  # fmt: skip
def test_some(arguments: list[str], tmp_path: Path) -> None:
    check(compile_kernels(tmp_path, *arguments, timeout_s=240))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all(arch: int, dtype: str, tmp_path: Path) -> None:
    check(compile_kernels(tmp_path, "--arch", str(arch), "--dtype", dtype, timeout_s=3500))
