from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(model_dir: Path) -> Iterator[Cluster]:
    """One prefill node and one decode node over tcp, shared by all tests that leave it as they found it."""
    with Cluster(model_dir) as cluster:
        yield cluster
