"""What a coordinator that vanished between two writes left behind, put right by the next one.

Each test makes the state that a kill at one moment leaves; the budget is spent, so no worker runs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from service_cases import check_books, optuna_trials, run, stored
from stub_trials import stub_study

from archsearch.propose.mirror import Mirror
from archsearch.records import TrialState
from archsearch.spec import StudySpec
from archsearch.store import Store
from archsearch.store.database import engine_options
from archsearch.store.tables import trials

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.fixture
def spec(tmp_path: Path) -> StudySpec:
    """A study whose budget of three trials is spent."""
    made = stub_study(tmp_path)
    run(made, trials=3)
    return made


def in_mirror(spec: StudySpec, deed: Callable[[Mirror], object]) -> None:
    """Do something to Optuna's view of a study."""
    url = spec.tracking.storage
    mirror = Mirror(spec, url, engine_options(url))
    try:
        deed(mirror)
    finally:
        mirror.close()


def change_trial(spec: StudySpec, number: int, **values: object) -> None:
    with Store(spec.tracking.storage) as store, store.database.writing() as connection:
        connection.execute(sa.update(trials).where(trials.c.number == number).values(**values))


def test_a_trial_that_only_optuna_knows_is_ended(spec: StudySpec) -> None:
    """Killed after the trial was shown and before its number was noted."""
    params = stored(spec)[0].params
    in_mirror(spec, lambda mirror: mirror.add(params, {"archsearch_trial": 3}))
    outcome = run(spec, trials=3)
    assert outcome.repaired == ("Optuna's trial 3 was left running and has ended",)
    check_books(spec)


def test_a_final_trial_that_optuna_does_not_show_is_shown(spec: StudySpec) -> None:
    change_trial(spec, 1, optuna_number=None)
    outcome = run(spec, trials=3)
    assert outcome.repaired == ("trial 1 had ended; Optuna's tables say so now",)
    check_books_with_a_leftover(spec)


def check_books_with_a_leftover(spec: StudySpec) -> None:
    """The trial is shown twice, complete both times; its number names the newer one."""
    states = [one.state.name for one in optuna_trials(spec)]
    assert states == ["COMPLETE"] * 4
    assert stored(spec)[1].optuna_number == 3


def test_a_final_trial_that_optuna_was_not_told_of_is_told(spec: StudySpec) -> None:
    """Killed after the ledger knew the end and before Optuna's view did."""
    shown: list[int] = []
    trial = stored(spec)[2]
    notes = {"archsearch_trial": 2}
    in_mirror(spec, lambda mirror: shown.append(mirror.add(trial.params, notes)))
    change_trial(spec, 2, optuna_number=shown[0])
    outcome = run(spec, trials=3)
    assert outcome.repaired == ("trial 2 had ended; Optuna's tables say so now",)
    view = optuna_trials(spec)[shown[0]]
    assert view.state.name == "COMPLETE"
    assert view.values == [trial.metrics["recall"], trial.metrics["state_bytes"]]
    assert set(view.constraints) == {"mixer_rules", "limit0.state_bytes"}


def test_a_duplicate_whose_leader_had_just_ended_ends(spec: StudySpec) -> None:
    leader = stored(spec)[0]
    values = {
        "arch": sa.select(trials.c.arch).where(trials.c.number == 0).scalar_subquery(),
        "params": leader.params,
        "state": TrialState.PENDING,
        "duplicate_of": 0,
        "metrics": {},
        "finished_at": None,
        "optuna_number": None,
    }
    change_trial(spec, 2, **values)
    run(spec, trials=2)
    copy = stored(spec)[2]
    assert copy.state is TrialState.DUPLICATE
    assert copy.metrics == leader.metrics
