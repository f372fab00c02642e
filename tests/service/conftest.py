"""One Ray for all service tests of a session, because starting it takes seconds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from archsearch.cluster import Cluster
from archsearch.spec import ResourcesSpec

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray that `run_study` finds running in this process and leaves running."""
    os.environ["PYTHONPATH"] = str(TESTS)  # workers import the pretended trials from here
    cluster = Cluster(ResourcesSpec(), None)
    yield
    cluster.close()
