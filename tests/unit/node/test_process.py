"""What is settled before torch is imported, in a process of its own."""

import subprocess
import sys


def test_cpus_that_are_not_there_are_told_of() -> None:
    for module in ("kvasir.prefill_node", "kvasir.decode_node"):
        command = [sys.executable, "-m", module, "--model", "/m", "--cpus", "4000"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert done.stderr == "error: --cpus 4000: none of them may be used here\n"
