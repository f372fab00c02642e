"""Servers that service tests share in a session, because starting them takes seconds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import free_port, postgres_server

from archsearch.cluster import Cluster
from archsearch.spec import ResourcesSpec

TESTS = Path(__file__).parent.parent


def inherited_path() -> list[str]:
    """Where else Python was told to look for modules."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray that `run_study` finds running in this process and leaves running."""
    # Workers import the pretended trials from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *inherited_path()])
    os.environ["RAY_OVERRIDE_RESOURCES"] = '{"GPU": 2}'  # pretended too: Ray only counts them
    cluster = Cluster(ResourcesSpec(), None)
    yield
    cluster.close()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of an empty database on a PostgreSQL server of our own."""
    port = free_port()
    with postgres_server("127.0.0.1", port):
        yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
