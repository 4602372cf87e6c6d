"""Prints the part of requirements.lock that some extras of pyproject.toml need, pins and hashes unchanged.

    python tools/select_lock.py router node > build/some.lock
    pip install --require-hashes -r build/some.lock

The lock file holds everything once; who only serves should not download the test tools. Each pin in it names,
after "# via", what asked for it: those edges are walked from the extras down. Should one be missing, pip
says so, for with --require-hashes it takes nothing that is not listed.

Runs on a bare Python 3.11: the standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def canonical(requirement: str) -> str:
    """Prometheus_Client>=0.2  ->  prometheus-client        redis[hiredis]  ->  redis"""
    name = re.match(r"[\w.-]+", requirement.strip())
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pins_by_name(lock: str) -> dict[str, str]:
    """Each pin with its hashes and its "via" comments, in the order of the file."""
    pins = re.findall(r"^[a-zA-Z0-9].*\n(?:[ \t]+.*\n)*", lock, flags=re.MULTILINE)
    return {canonical(pin): pin for pin in pins}


def needed_by(pin: str) -> set[str]:
    _, _, via = pin.partition("# via")
    return {canonical(line.strip("# ")) for line in via.splitlines() if line.strip("# ")}


def roots(project: dict[str, dict], extras: list[str]) -> set[str]:
    optional = project["project"]["optional-dependencies"]
    unknown = set(extras) - set(optional)
    if unknown:
        sys.exit(f"select_lock: no such extra: {', '.join(sorted(unknown))}; there are {', '.join(optional)}")
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    return {canonical(name) for name in sum((optional[extra] for extra in extras), requirements)}


def closure(wanted: set[str], pins: dict[str, str]) -> set[str]:
    missing = wanted - set(pins)
    if missing:
        sys.exit(f"select_lock: requirements.lock lacks {', '.join(sorted(missing))}: run `make lock`")
    parents = {name: needed_by(pin) for name, pin in pins.items()}
    selected: set[str] = set()
    while wanted - selected:
        selected |= wanted
        wanted = {name for name in pins if parents[name] & selected}
    return selected


def main(extras: list[str]) -> None:
    pins = pins_by_name((REPO / "requirements.lock").read_text())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    selected = closure(roots(project, extras), pins)
    print("".join(pin for name, pin in pins.items() if name in selected), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
