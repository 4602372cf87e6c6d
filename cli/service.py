"""`kvasir router | prefill | decode`: one service in this process, as `python -m kvasir.router` would run it."""

import runpy
import sys


def main(argv: list[str]) -> int:
    """The first word is the package; its own `__main__` reads the others."""
    package, *options = argv
    sys.argv = [package, *options]
    runpy.run_module(package, run_name="__main__", alter_sys=True)
    return 0
