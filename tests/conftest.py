"""How tests share the cores: each process computes on one, and services start one after another."""

import os
import signal
from typing import Any

import pytest

# Before torch and Ray are imported, and for the processes that tests start. Threads that wait for
# each other on cores that are taken make a suite many times slower; and Ray's workers, which yield
# to all other processes, would hardly run while other tests compute.
os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}

# A suite started in the background ignores what tests send to the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file, and all tests of services, which watch clocks, in one of xdist's processes."""
    from xdist.scheduler import LoadScopeScheduling  # one that tests on one process do without

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "services" if file.startswith("tests/service/") else file

    return ByFile(config, log)
