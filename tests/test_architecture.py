"""The house of the design, held by reading the imports: arrows go down only, and the leaves stay light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "proto": set(),
    "common": set(),
    "kernels": set(),
    "engine": {"kernels", "common", "proto"},
    "kv_connector": {"engine", "kernels", "common", "proto"},
    "node": {"engine", "kv_connector", "common", "proto"},
    "prefill_node": {"node", "engine", "kv_connector", "common", "proto"},
    "decode_node": {"node", "engine", "kv_connector", "common", "proto"},
    "router": {"common", "proto"},
    "bench": {"common"},
    "cli": {"common", "proto", "bench"},
}
# What is imported inside a function, or named in a string, for the process that needs it alone.
MAY_IMPORT_LATE = {"cli": {"router", "prefill_node", "decode_node"}}
# Translation to and from the wire has its own file; the rest of these knows no messages.
PROTO_ONLY_IN_WIRE = {"engine", "kv_connector"}

TENSOR_LIBRARIES = {"torch", "triton", "numba"}
TEXT_LIBRARIES = {"tokenizers", "transformers", "jinja2"}
MUST_NOT_IMPORT = {
    "proto": TENSOR_LIBRARIES | TEXT_LIBRARIES,
    "common": TENSOR_LIBRARIES | TEXT_LIBRARIES,
    "engine": TEXT_LIBRARIES,
    "kv_connector": TEXT_LIBRARIES,
    "node": TEXT_LIBRARIES,
    "prefill_node": TEXT_LIBRARIES,
    "decode_node": TEXT_LIBRARIES,
    "router": TENSOR_LIBRARIES | {"numpy", "transformers"},
    "cli": TENSOR_LIBRARIES | {"transformers"},
}

# "kvasir.engine", "kvasir.kv_connector.tcp.connector:TcpConnector": a module that something imports by its name.
MODULE_NAME = re.compile(rf"kvasir\.({'|'.join(MAY_IMPORT)})(\.\w+)*(:\w+)?")


def files_of(package: str) -> Iterator[Path]:
    """The lab measures other packages and may import them; nothing here depends on it."""
    for path in sorted((REPO / package).rglob("*.py")):
        if not path.is_relative_to(REPO / "bench" / "lab"):
            yield path


def modules_named(tree: ast.AST, *, late: bool) -> Iterator[str]:
    """Modules imported at once, or late: within a function, or by a string that names one."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[str]:
        if late and isinstance(node, ast.Constant) and isinstance(node.value, str):
            if MODULE_NAME.fullmatch(node.value):
                yield node.value.partition(":")[0]
        elif in_function == late and isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif in_function == late and isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function)

    return walk(tree, False)


def ours(modules: Iterator[str]) -> set[str]:
    """kvasir.engine.request.Request  ->  engine"""
    packages = {name.split(".")[1] for name in modules if name.startswith("kvasir.")}
    return packages - {"__version__"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_reader_of_imports_misses_none() -> None:
    tree = ast.parse(
        "import kvasir.engine.request, torch\nfrom kvasir.bench import y\nfrom kvasir import common\n"
        "if TYPE_CHECKING:\n    import kvasir.node\n"
        "class C:\n    import kvasir.kernels\n    def f(self):\n        from kvasir.proto import kv_pb2\n"
        "names = {'h': 'kvasir.router.app:App', 'prose': 'kvasir.cli serves', 'file': 'kvasir.json'}\n"
    )
    assert ours(modules_named(tree, late=False)) == {"engine", "bench", "common", "node", "kernels"}
    assert ours(modules_named(tree, late=True)) == {"proto", "router"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_down_only(package: str) -> None:
    for path in files_of(package):
        allowed = MAY_IMPORT[package] | {package}
        late = allowed | MAY_IMPORT_LATE.get(package, set())
        if package in PROTO_ONLY_IN_WIRE and path.name != "wire.py":
            allowed, late = allowed - {"proto"}, late - {"proto"}
        tree = parse(path)
        illegal = (ours(modules_named(tree, late=False)) - allowed) | (ours(modules_named(tree, late=True)) - late)
        assert not illegal, f"{path.relative_to(REPO)} must not import {sorted(illegal)}"


@pytest.mark.parametrize("package", MUST_NOT_IMPORT)
def test_heavy_libraries_stay_where_they_belong(package: str) -> None:
    for path in files_of(package):
        tree = parse(path)
        modules = {*modules_named(tree, late=False), *modules_named(tree, late=True)}
        illegal = {name.split(".")[0] for name in modules} & MUST_NOT_IMPORT[package]
        assert not illegal, f"{path.relative_to(REPO)} must not import {sorted(illegal)}"


def test_nothing_but_the_command_line_imports_the_lab() -> None:
    for package in MAY_IMPORT:
        for path in files_of(package):
            tree = parse(path)
            at_once, late = modules_named(tree, late=False), modules_named(tree, late=True)
            named = [*at_once, *(late if package != "cli" else ())]
            assert not [name for name in named if name.startswith("kvasir.bench.lab")], path


def test_only_kernels_turn_tensors_into_arrays() -> None:
    for package in MAY_IMPORT.keys() - {"kernels", "bench"}:
        for path in files_of(package):
            for node in ast.walk(parse(path)):
                calls_numpy = isinstance(node, ast.Attribute) and node.attr == "numpy"
                assert not calls_numpy, f"{path.relative_to(REPO)}:{node.lineno} calls .numpy()"


def test_every_folder_is_linked_and_nothing_else_is() -> None:
    root = REPO / "src" / "kvasir"
    links = {path.name: path.readlink() for path in root.iterdir() if path.is_symlink()}
    assert links == {package: Path("../..") / package for package in MAY_IMPORT}
    real = {path.name for path in root.iterdir() if not path.is_symlink()}
    assert real - {"__pycache__"} == {"__init__.py", "py.typed"}


@pytest.mark.parametrize("folder", ["kernels", "proto"])
def test_folders_that_other_packages_look_for_by_name_are_no_packages(folder: str) -> None:
    """transformers looks for a package `kernels` on import, proto-plus is imported as `proto`."""
    assert not list((REPO / folder).rglob("__init__.py"))


def run_python(code: str) -> None:
    # From the root of the repository, where `import kernels` finds our folder.
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env={"PYTHONPATH": "src"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_a_router_runs_without_torch() -> None:
    run_python(
        "import sys, kvasir.router.app\n"
        "heavy = sorted({'torch', 'triton', 'numba', 'transformers'} & set(sys.modules))\n"
        "assert not heavy, heavy"
    )


def test_the_model_of_transformers_is_not_disturbed() -> None:
    run_python(
        "import kvasir.kernels, kvasir.proto.common_pb2\n"
        "from transformers.models.llama import modeling_llama\n"
        "from transformers.utils import is_kernels_available\n"
        "assert modeling_llama.LlamaForCausalLM\n"
        "assert not is_kernels_available(), 'our folder was taken for the package of that name'"
    )
