"""How tests share the cores: each process computes on one, and services start one after another."""

import os
from pathlib import Path

import pytest

# Before torch and Ray are imported, and for the processes that tests start. Threads that wait for
# each other on cores that are taken make a suite many times slower; and Ray's workers, which yield
# to all other processes, would hardly run while other tests compute.
os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
SERVICE = Path(__file__).parent / "service"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file, and all tests of services, which watch clocks, in one of xdist's processes."""
    for item in items:
        is_service = item.path.is_relative_to(SERVICE)
        item.add_marker(pytest.mark.xdist_group("service" if is_service else str(item.path)))
