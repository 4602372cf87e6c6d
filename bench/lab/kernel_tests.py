"""The tests of kernels and engine on a GPU, as far as they come in a given time: for the kernels' bench."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/unit/kernels/triton",
    "tests/unit/engine/test_cuda.py",
    "tests/unit/engine/test_cuda_tensor_parallel.py",
)


def run_tests(limit_s: float, tests: Sequence[str] = TESTS, most_processes: int = 12) -> tuple[bool, str]:
    """-> whether all passed, and pytest's last line. What it prints goes to standard error."""
    # None of the project's own options, which name plugins that a machine with a GPU may lack.
    bare = ["-o", "addopts=", "-o", "filterwarnings=", "--import-mode=importlib", "-m", "not full", "-q", "-ra"]
    # Compiling takes most of the time, and that is for the processors.
    num_processes = min(os.cpu_count() or 1, most_processes) if find_spec("xdist") else 1
    parallel = ["-n", str(num_processes)] if num_processes > 1 else []
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *bare, *parallel, *tests],
        cwd=REPO, env=os.environ | {"TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        said = output.strip().rpartition("\n")[2].strip("= ")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        said = f"not at their end after {limit_s:.0f} s"
    print(output, file=sys.stderr, flush=True)
    return process.returncode == 0, said
