"""What the service tests share: running a pretended study here, and looking at what it left."""

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import optuna
from stub_trials import FUNCTION, changed

from archsearch.coordinator import run_study
from archsearch.messages import PluginFile
from archsearch.records import TrialRecord, TrialState
from archsearch.snapshot import Snapshot, StudyOutcome
from archsearch.spec import StudySpec
from archsearch.store import Store


@contextlib.contextmanager
def held(folder: Path) -> Iterator[IO[str]]:
    """Hold the lock that trials ordered to `hold` wait for."""
    with (folder / "hold").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


TESTS = Path(__file__).parent


class Watcher:
    """An observer that keeps every snapshot."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def on_event(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


def run(
    spec: StudySpec,
    trials: int | None = None,
    time_s: float | None = None,
    watcher: Watcher | None = None,
    plugins: tuple[PluginFile, ...] = (),
) -> StudyOutcome:
    """Run a pretended study in this process, on the session's Ray."""
    budget = {"trials": trials, "time_s": time_s}
    given = {name: value for name, value in budget.items() if value is not None}
    spec = changed(spec, "search", **given)
    return run_study(spec, plugins, watcher or Watcher(), trial_function=FUNCTION)


def stored(spec: StudySpec) -> list[TrialRecord]:
    with Store(spec.tracking.storage) as store:
        return store.trials(spec.study)


def starts(folder: Path, what: str = "trained") -> Counter[str]:
    """How often a worker began to train (or only to profile) each architecture."""
    traces = (path.name.split(".") for path in (folder / "traces").glob(f"*.{what}"))
    return Counter(arch_hash for _study, _number, _start, arch_hash, _what in traces)


def check_books(spec: StudySpec) -> None:
    """Every trial is accounted for once, and Optuna's own tables say the same."""
    trials = stored(spec)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    shown = {trial.number: trial for trial in optuna_trials(spec)}
    assert not any(trial.state is optuna.trial.TrialState.RUNNING for trial in shown.values())
    for trial in trials:
        assert trial.state.is_final and trial.optuna_number is not None
        view = shown.pop(trial.optuna_number)
        assert view.params == trial.params
        assert view.user_attrs["archsearch_trial"] == trial.number
        first = trial if trial.duplicate_of is None else trials[trial.duplicate_of]
        assert view.state.name == expected_view(first)
        if view.state is optuna.trial.TrialState.COMPLETE:
            assert view.values == [trial.metrics[one.metric] for one in spec.objectives]
        if view.state is not optuna.trial.TrialState.FAIL:
            assert set(view.constraints) == constraint_names(spec)
    assert all(left.state is optuna.trial.TrialState.FAIL for left in shown.values())


def optuna_trials(spec: StudySpec) -> list[optuna.trial.FrozenTrial]:
    """The study as Optuna's own tools see it."""
    storage = optuna.storages.RDBStorage(spec.tracking.storage)
    try:
        return optuna.load_study(study_name=spec.study, storage=storage).trials
    finally:
        storage.remove_session()
        storage.engine.dispose()


def expected_view(trial: TrialRecord) -> str:
    if trial.state in (TrialState.INFEASIBLE, TrialState.STOPPED):
        return "PRUNED"
    return "FAIL" if trial.failure is not None else "COMPLETE"


def constraint_names(spec: StudySpec) -> set[str]:
    return {"mixer_rules", *(f"limit{i}.{one.metric}" for i, one in enumerate(spec.limits))}


class Driver:
    """A coordinator in another process, with a Ray of its own unless it is told an address.

    Args:
        settings: as in `stub_driver`.
    """

    def __init__(
        self,
        folder: Path,
        orders: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        told = [json.dumps(orders), json.dumps(settings)]
        self.held = set(orders.get("hold", []))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stub_driver", str(folder), *told],
            env={
                **(environment or os.environ),
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            },
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read_until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read its output up to the line that is waited for."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if wanted(said):
                return said
        raise AssertionError(f"the coordinator ended with {self.process.wait()}")

    def wait_until_held(self) -> list[int]:
        """Wait until all trials that are ordered to hold run; return their workers."""
        return [pid for _node, pid in self.where_held()]

    def where_held(self) -> list[tuple[str, int]]:
        """Wait as above; return the node and the process of each."""

        def all_run(said: dict[str, Any]) -> bool:
            workers = dict(said.get("running", []))
            return set(workers) == self.held and all(workers.values())

        running = self.read_until(all_run)["running"]
        workers = (worker.split() for _number, worker in running)
        return [(node, int(pid)) for node, _pid, pid in workers]

    def children(self) -> list[int]:
        """Its processes and theirs."""
        found, todo = list[int](), [self.process.pid]
        while todo:
            pid = todo.pop()
            out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
            new = [int(child) for child in out.stdout.split()]
            found += new
            todo += new
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def wait_for_end(pid: int, timeout_s: float = 20.0) -> bool:
    """True once a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
