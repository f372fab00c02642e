"""Coordinators in forked processes, in which something happens at one moment.

Forked from a server that has imported everything, so that they are up at once. A moment is a call
of one of the product's functions, before or after it. Faults are functions of modules, with their
arguments: they have to travel to the fork.
"""

import fcntl
import importlib
import itertools
import multiprocessing
import os
import select
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretended_cluster import PretendedCluster
from stub_trials import FUNCTION

from archsearch.coordinator import run, run_study
from archsearch.errors import ArchsearchError
from archsearch.snapshot import Snapshot
from archsearch.spec import StudySpec
from archsearch.tracking import Publisher

TEMPLATES = "ARCHSEARCH_FAULT_TEMPLATES"
"""Environment variable: folder of databases, which take seconds to make."""
LOCAL = "local"
"""Stands for a Ray that the study starts."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fault_warmup", "ray"])


@dataclass(frozen=True)
class Moment:
    """Before or after the `nth` call of a function, `module:name` or `module:class.name`."""

    function: str
    is_after: bool
    nth: int


def at(moment: Moment, deed: Callable[[], object]) -> None:
    """Do something at a moment of this process, from now on."""
    module, _, path = moment.function.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    original, calls = getattr(owner, name), itertools.count(1)

    def planted(*args: Any, **kwargs: Any) -> Any:
        is_now = next(calls) == moment.nth
        if is_now and not moment.is_after:
            deed()
        result = original(*args, **kwargs)
        if is_now and moment.is_after:
            deed()
        return result

    setattr(owner, name, planted)


class Nobody:
    def on_event(self, snapshot: Snapshot) -> None:
        pass


def drive(
    spec: StudySpec,
    address: str | None = None,
    cluster: Any = None,
    function: str = FUNCTION,
) -> str:
    """Run a study here and return how it ends.

    Args:
        address: of Ray, or `LOCAL`; without one it runs on a pretended cluster.
        cluster: another class of cluster.
        function: what a trial does.
    """
    uri = spec.tracking.mlflow
    publisher = Publisher(spec.tracking.storage, spec.study, uri) if uri is not None else None
    real = run.Cluster
    run.Cluster = cluster or (PretendedCluster if address is None else real)
    try:
        where = None if address == LOCAL else address
        return run_study(spec, (), Nobody(), publisher, where, function).stop_reason
    finally:
        run.Cluster = real


def strike(moment: Moment, blow: signal.Signals, home: Path) -> None:
    """A fault: this process gets a signal at a moment."""
    at(moment, partial(_strike, home, blow))


def _strike(home: Path, blow: signal.Signals) -> None:
    (home / "reached").touch()
    os.kill(os.getpid(), blow)


def stand(moment: Moment, home: Path) -> None:
    """A fault: at a moment, this thread waits until the fork is told to go on."""
    at(moment, partial(_stand, home))


def _stand(home: Path) -> None:
    with (home / "stands").open("w") as lock:
        (home / "reached").touch()
        fcntl.flock(lock, fcntl.LOCK_SH)


class Fork:
    """A coordinator in a process of its own.

    Args:
        spec: the study; its trials run on Ray at an address, or on a pretended cluster.
        folder: where a folder of the fork's own is made.
        fault: called in the fork before the study, with that folder.
    """

    def __init__(
        self,
        spec: StudySpec,
        folder: Path,
        fault: Callable[[Path], object],
        address: str | None = None,
    ) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="fork-", dir=folder))
        self._lock = (self._home / "stands").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._process = _FORKS.Process(target=_child, args=(spec, self._home, fault, address))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def reached(self) -> bool:
        """True once it has come to its moment."""
        return (self._home / "reached").exists()

    def wait_until_it_stands(self) -> None:
        """Return once it has come to the moment at which it waits."""
        while not self.reached:
            # Both a pause and a look whether it died.
            ready, _, _ = select.select([self._process.sentinel], [], [], 0.02)
            assert not ready, f"the moment never came: {self.end()}"

    def go_on(self) -> None:
        """Let it go on from the moment at which it waits."""
        self._lock.close()

    def end(self) -> str:
        """Wait for its end: the reason for which its study stopped, an error, or a signal."""
        self._process.join()
        self._lock.close()
        code = self._process.exitcode
        self._process.close()
        if code != 0:
            return f"exit code {code}"
        return (self._home / "said").read_text()


def _child(
    spec: StudySpec, home: Path, fault: Callable[[Path], object], address: str | None
) -> None:
    os.chdir(home)
    fault(home)
    try:
        said = drive(spec, address)
    except ArchsearchError as error:
        said = f"{type(error).__name__}: {error}"
    (home / "said").write_text(said)
