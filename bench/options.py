"""Moved to `command_line` and `target`."""

import argparse
from typing import Any

from kvasir.bench.command_line import positive as positive
from kvasir.bench.target import TargetOptions as TargetOptions
from kvasir.bench.target import add_target_options as add_target_options
from kvasir.bench.target import target_options_of


def target_fields(given: argparse.Namespace) -> dict[str, Any]:
    options = target_options_of(TargetOptions, given)
    return {name: getattr(options, name) for name in TargetOptions.__slots__}
