"""The tests of the kernels notice mistakes: `make test-mutations` makes them all."""

import os
import subprocess
import sys

import pytest

from tests.unit.kernels.triton.mutations import MUTATIONS, every_id, mutated

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="mutants run interpreted only")

# A mask, a reduction, a 32-bit offset.
A_FEW = ["write_kv:15", "decode_attention:3", "paged_tiles:5"]


def mutate(ids: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.unit.kernels.triton.mutate", *ids]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def test_every_mutation_still_fits_its_kernel() -> None:
    for name, mutations in MUTATIONS.items():
        for old, new in mutations:
            assert mutated(name, old, new)


def test_a_few_are_noticed_and_a_kernel_without_a_mistake_lives() -> None:
    """The latter, for else the tests would fail for another reason than the mistake."""
    code = (
        "import sys\n"
        "from tests.unit.kernels.triton import mutate\n"
        "from tests.unit.kernels.triton.mutations import KERNELS\n"
        "source = (KERNELS / 'write_kv.py').read_text(encoding='utf-8')\n"
        "print(mutate.run('write_kv', source).value)\n"
        "sys.exit(mutate.main(sys.argv[1:]))"
    )
    ran = subprocess.run([sys.executable, "-c", code, *A_FEW], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("LIVES", f"{len(A_FEW)} of {len(A_FEW)} killed")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTATIONS)
def test_all_are_noticed(name: str) -> None:
    ids = [mutation for mutation in every_id() if mutation.startswith(f"{name}:")]
    ran = mutate(ids, timeout_s=3500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
