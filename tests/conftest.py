import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from kvasir.cli.builtin_model import prepare_builtin_model

# Before anything imports triton: what it was when triton was imported counts. No test but those of the kernels minds.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says how busy this machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# `make test-browser` installs what these import.
collect_ignore = [] if find_spec("playwright") else ["browser"]


class OneClusterAtATime(LoadFileScheduling):
    """Files go to whichever worker is free. Those with clusters of real processes are one piece of work, begun first:
    two clusters at once would be too much for two cores, and one leaves a core idle for most of the time.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return OneClusterAtATime(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model, SmolLM2-135M-Instruct in fp32."""
    return prepare_builtin_model()
