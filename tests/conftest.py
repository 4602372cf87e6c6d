import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from kvasir.cli.model import prepare_builtin_model

# Before anything imports triton: what it was when triton was imported counts. No test but those of the kernels minds.
os.environ.setdefault("TRITON_INTERPRET", "1")

# `make test-browser` installs what these import.
collect_ignore = [] if find_spec("playwright") else ["browser"]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model, SmolLM2-135M-Instruct in fp32."""
    return prepare_builtin_model()


class OneClusterAtATime(LoadFileScheduling):
    """Of several processes of pytest, each takes file after file; one of them all those that start clusters."""

    def _split_scope(self, nodeid: str) -> str:
        return "e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneClusterAtATime:
    return OneClusterAtATime(config, log)
