import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvasir.cli.builtin_model import prepare_builtin_model

# Before anything imports triton: what it was when triton was imported counts. No test but those of the kernels minds.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says how busy this machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# `make test-browser` installs what these import.
collect_ignore = [] if find_spec("playwright") else ["browser"]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model, SmolLM2-135M-Instruct in fp32."""
    return prepare_builtin_model()
