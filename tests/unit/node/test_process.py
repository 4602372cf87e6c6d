"""What is settled before torch is imported, and how it ends, in a process of its own."""

import os
import subprocess
import sys

import pytest

# It says nothing before it leaves: what it prints lies in a buffer.
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
LEAVES = "from kvasir.node.process import leave; print('bye', end=''); leave(3)"


def test_cpus_that_are_not_there_are_told_of() -> None:
    for module in ("kvasir.prefill_node", "kvasir.decode_node"):
        command = [sys.executable, "-m", module, "--model", "/m", "--cpus", "4000"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert done.stderr == "error: --cpus 4000: none of them may be used here\n"


def test_what_was_said_is_heard_though_the_process_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], env=BUFFERED, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (3, "bye", "")


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
def test_the_status_is_told_where_nothing_can_be_said(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, LEAVES]
    assert subprocess.run(command, env=BUFFERED, timeout=240).returncode == 3


def test_the_status_is_told_though_nobody_reads() -> None:
    """As behind `| head`. It said 1, which is a crashed engine's."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        done = subprocess.run([sys.executable, "-c", LEAVES], env=BUFFERED, stdout=nobody, stderr=nobody, timeout=240)
    assert done.returncode == 3
