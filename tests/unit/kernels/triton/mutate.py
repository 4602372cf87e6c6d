"""Runs the tests of kernels with a mistake in them: python -m tests.unit.kernels.triton.mutate [write_kv:3 ...]

The mutated file is written to a temporary folder and imported under the kernel's name, in a process of its own, which
runs the tests until one fails. What lives is printed, and the exit status says whether anything does.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
import resource
import sys
import tempfile
from enum import Enum
from pathlib import Path

import hypothesis
import pytest
import torch
import triton

from tests.unit.kernels.triton.mutations import MUTATIONS, TESTS, every_id, mutated

HERE = Path(__file__).resolve().parent
CPU_LIMIT_S = 120  # a mutant that takes longer hangs; other processes, and a stopped one, do not count
_NOT_RUN = 70
_LOADED_BEFORE_FORKING = (torch, triton)  # once, and not again for each mutation
# The first example that fails will do: nobody wants the smallest.
_FIRST_FAILURE = hypothesis.settings(
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], derandomize=True, report_multiple_bugs=False
)


class Outcome(Enum):
    KILLED = "killed"
    LIVES = "LIVES"  # no test noticed
    BROKEN = "BROKEN"  # its text is not in the file once, or the tests could not be run


def run(name: str, source: str) -> Outcome:
    """In a child process, for the kernel it imports is a mutant, and a mutant may write anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            status = _NOT_RUN
            try:
                status = _run_tests(name, source, Path(folder))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):  # it read or wrote outside its tensors, or hung
        return Outcome.KILLED
    return {0: Outcome.LIVES, 1: Outcome.KILLED}.get(os.WEXITSTATUS(status), Outcome.BROKEN)


def _run_tests(name: str, source: str, folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    hypothesis.settings.register_profile("mutants", _FIRST_FAILURE)
    hypothesis.settings.load_profile("mutants")
    silent = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    module_name = f"kvasir.kernels.triton.{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    tests = [str(HERE / f"{file}.py") for file in TESTS.get(name, (f"test_{name}",))]
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not full"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis was imported before
    return int(pytest.main([*options, *tests]))


def main(ids: list[str]) -> int:
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for mutation in ids or every_id():
        name, _, index = mutation.partition(":")
        old, new = MUTATIONS[name][int(index)]
        try:
            outcome = run(name, mutated(name, old, new))
        except ValueError as error:
            print(error)
            outcome = Outcome.BROKEN
        outcomes.append(outcome)
        print(f"{outcome.value:7} {mutation:25} {old!r} -> {new!r}", flush=True)
    left = [outcome for outcome in outcomes if outcome is not Outcome.KILLED]
    print(f"{len(outcomes) - len(left)} of {len(outcomes)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
