"""Kernels, engine, their tests on a GPU and their bench run where there is torch, Triton and numpy, and no more."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]

# Packages of others are refused, but for these and all that they need themselves.
CODE = """
import re, sys
from importlib import import_module, metadata
from pathlib import Path

def with_needs(names):
    known, new = set(), {re.sub("[-_.]+", "-", name).lower() for name in names}
    while new:
        name = new.pop()
        known.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        needed = {re.match("[A-Za-z0-9._-]+", line)[0] for line in lines if "extra ==" not in line}
        new |= {re.sub("[-_.]+", "-", one).lower() for one in needed} - known
    return known

allowed = with_needs(sys.argv[1].split(","))
owners = metadata.packages_distributions()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        owner = {re.sub("[-_.]+", "-", one).lower() for one in owners.get(top, ())}
        if owner and not owner & allowed and top not in ("kvasir", "tests"):
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    import_module(name)
"""


def modules(folder: str, but: tuple[str, ...] = ()) -> list[str]:
    files = [path.relative_to(REPO) for path in sorted((REPO / folder).rglob("*.py")) if path.name != "__init__.py"]
    names = [".".join(path.with_suffix("").parts) for path in files if "cpu" not in path.parts]
    return [name for name in names if name not in but]


def run_bare(names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, "torch,triton,numpy,pytest,hypothesis", *names]
    environment = {"PYTHONPATH": f"src:{REPO}", "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=400)


def test_what_runs_on_a_gpu_needs_no_more() -> None:
    for_nodes = ("engine.wire", "engine.grammar", "engine.async_engine")  # which have the rest
    ours = [f"kvasir.{name}" for name in (*modules("kernels"), *modules("engine", for_nodes), "bench.lab.kernels")]
    tests = [name for name in modules("tests/unit/kernels/triton") if name.rpartition(".")[2].startswith("test_")]
    ran = run_bare([*ours, *tests, "tests.unit.engine.test_cuda", "kvasir.cli.builtin_model"])
    assert ran.returncode == 0, ran.stderr


def test_more_would_be_noticed() -> None:
    assert "google is not on this machine" in run_bare(["google.protobuf"]).stderr.replace(".protobuf", "")
