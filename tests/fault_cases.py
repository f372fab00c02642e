"""What the fault matrix shares: a site for each case, and the accounts that each must pass."""

import contextlib
import hashlib
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fault_driver import Fork, Moment, drive, strike
from mlflow import MlflowClient
from service_cases import check_books, optuna_trials, starts, stored
from stub_trials import changed, stub_study

from archsearch.errors import EXIT_INTERRUPTED, FailureClass
from archsearch.records import AttemptState, TrialRecord, TrialState
from archsearch.spec import StudySpec
from archsearch.store import Store
from archsearch.store.tables import evaluations

TRIALS = 6
_STATUS = {
    TrialState.COMPLETE: "FINISHED",
    TrialState.INFEASIBLE: "KILLED",
    TrialState.STOPPED: "KILLED",
    TrialState.FAILED: "FAILED",
}


@dataclass
class Site:
    """One study with its own folder, where something goes wrong.

    Args:
        folder: weights, MLflow and, without another storage, the database.
        study: its name, which no other study of that storage has.
        storage: URL of a database that others use, too; None for a file of its own.
        templates: folder of empty databases.
    """

    folder: Path
    study: str
    storage: str | None
    templates: Path
    orders: dict[str, Any] = field(default_factory=dict)
    """To the trials, as in `stub_trials`."""
    may_fail: bool = False
    """Trials may end as failed."""

    trials: int = TRIALS
    resources: dict[str, Any] = field(default_factory=dict)
    servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Of this site alone; they end with its test."""

    def __post_init__(self) -> None:
        for name in ("archsearch.db", "mlflow.db"):
            shutil.copy(self.templates / name, self.folder)
        self.mlflow = f"sqlite:///{self.folder}/mlflow.db"

    @property
    def spec(self) -> StudySpec:
        orders = {**self.orders, "trials": self.trials}
        spec = stub_study(self.folder, self.study, orders)
        spec = changed(spec, "tracking", mlflow=self.mlflow)
        spec = changed(spec, "resources", **self.resources)
        return changed(spec, "tracking", storage=self.storage) if self.storage else spec

    def fork(self, fault: Callable[[Path], object], address: str | None = None) -> Fork:
        return Fork(self.spec, self.folder, fault, address)

    def strike(self, moment: Moment, blow: signal.Signals, address: str | None = None) -> None:
        """Run the study in a process that gets a signal at a moment, and wait for its end."""
        fork = self.fork(partial(strike, moment, blow), address)
        said = fork.end()
        assert fork.reached, f"{moment} never came: {said}"
        if blow is signal.SIGKILL:
            assert said == f"exit code {-signal.SIGKILL}"
        elif said != f"exit code {EXIT_INTERRUPTED}":  # at once, if all but publishing is done
            assert not said.startswith(("exit code", "ServiceError")), said

    def rerun(self) -> None:
        """Go on with the study, undisturbed, to its end."""
        assert drive(self.spec) == "trials"

    def attempts(self, number: int) -> list[FailureClass | None]:
        return [attempt.failure for attempt in stored(self.spec)[number].attempts]


def check_accounts(site: Site) -> None:
    """Every trial of a finished study is accounted for exactly once, wherever one looks."""
    spec = site.spec
    trials = stored(spec)
    check_books(spec)
    work = [one for one in trials if one.state is not TrialState.INFEASIBLE]
    work = [one for one in work if one.duplicate_of is None]
    assert len(work) == len({one.arch.arch_hash for one in work}) == site.trials
    if not site.may_fail:
        assert {one.state for one in work} == {TrialState.COMPLETE}
    ended = Counter(one.user_attrs["archsearch_trial"] for one in complete_in_optuna(spec))
    assert set(ended.values()) <= {1}, "shown as complete more than once"
    _check_attempts(work)
    _check_training(site, work)
    _check_mlflow(site, trials)


def trained_so_far(site: Site) -> dict[str, int]:
    """How often each architecture was trained whose evaluation is stored."""
    mine = evaluations.c.weights_path.startswith(str(site.folder))
    with Store(site.spec.tracking.storage) as store, store.database.reading() as connection:
        found = set(connection.scalars(sa.select(evaluations.c.arch_hash).where(mine)))
    return {arch_hash: starts(site.folder)[arch_hash] for arch_hash in found}


def complete_in_optuna(spec: StudySpec) -> list[Any]:
    return [one for one in optuna_trials(spec) if one.state.name == "COMPLETE"]


def _check_attempts(work: list[TrialRecord]) -> None:
    tokens = [attempt.token for trial in work for attempt in trial.attempts]
    assert len(tokens) == len(set(tokens))
    for trial in work:
        states = [attempt.state for attempt in trial.attempts]
        assert AttemptState.RUNNING not in states
        wanted = trial.state is TrialState.COMPLETE and not trial.from_cache
        assert states.count(AttemptState.DONE) == wanted


def _check_training(site: Site, work: list[TrialRecord]) -> None:
    """Nothing is trained again but what was lost; all weights are there and whole."""
    trained = starts(site.folder)
    for trial in work:
        lost = [one for one in trial.attempts if one.failure is FailureClass.LOST]
        assert trained[trial.arch.arch_hash] <= 1 + len(lost)
        if trial.state is TrialState.COMPLETE:
            assert trial.weights_path is not None
            weights = Path(trial.weights_path).read_bytes()
            assert hashlib.sha256(weights).hexdigest() == trial.weights_sha256
    named = {Path(trial.weights_path) for trial in work if trial.weights_path}
    found = {path for path in (site.folder / "weights").iterdir() if path.is_file()}
    assert named <= found
    assert not [path for path in found if path.suffix == ".tmp"], "half-written weights"


def _check_mlflow(site: Site, trials: list[TrialRecord]) -> None:
    client = MlflowClient(tracking_uri=str(site.spec.tracking.mlflow))
    experiment = client.get_experiment_by_name(site.study)
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id]))
    shown = {run.data.tags["archsearch.key"].split("/")[1]: run.info.status for run in runs}
    assert len(shown) == len(runs), "a trial has two runs"
    assert shown.pop("summary") == "FINISHED"
    own = [one for one in trials if one.duplicate_of is None]
    assert shown == {str(one.number): _STATUS[one.state] for one in own}


def proposals(spec: StudySpec) -> list[str]:
    return [trial.arch.canonical_json for trial in stored(spec)]
