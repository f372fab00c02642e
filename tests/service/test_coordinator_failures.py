"""What goes wrong in a trial: how it is named, whether it is tried again, what is kept of it."""

from pathlib import Path
from typing import Any

import pytest
from service_cases import Watcher, check_books, held, run, starts, stored
from stub_trials import changed, stub_study

from archsearch.errors import FailureClass, ServiceError
from archsearch.records import AttemptState, TrialRecord, TrialState
from archsearch.store import Store

pytestmark = pytest.mark.usefixtures("ray_here")


def states(trial: TrialRecord) -> list[tuple[AttemptState, FailureClass | None]]:
    return [(attempt.state, attempt.failure) for attempt in trial.attempts]


def test_every_way_to_fail_has_its_class(tmp_path: Path) -> None:
    orders: dict[str, Any] = {
        "kill": [0],
        "raise": [1],
        "exhaust": [2],
        "lose": [3],
        "diverge": [4],
        "infinite": [5],
        "nothing": [6],
    }
    spec, watcher = stub_study(tmp_path, orders=orders), Watcher()
    outcome = run(spec, trials=8, watcher=watcher)
    assert (outcome.last.evaluated, outcome.last.failed, outcome.last.complete) == (8, 7, 1)
    trials = [trial for trial in stored(spec) if trial.state is not TrialState.DUPLICATE]
    classes = [trial.failure for trial in trials]
    assert classes == [
        FailureClass.LOST,
        FailureClass.PLUGIN_ERROR,
        FailureClass.OUT_OF_MEMORY,
        FailureClass.LOST,
        FailureClass.DIVERGED,
        FailureClass.PLUGIN_ERROR,
        FailureClass.PLUGIN_ERROR,
        None,
    ]
    lost, raised, _, reported, diverged, infinite, silent, _ = trials
    assert states(lost) == states(reported) == [(AttemptState.FAILED, FailureClass.LOST)] * 3
    assert states(diverged) == [(AttemptState.FAILED, FailureClass.DIVERGED)]
    assert "ZeroDivisionError: as ordered" in raised.message
    assert "stub_trials.py" in raised.traceback
    assert "should be a finite number" in infinite.message
    assert "without a last event" in silent.message
    assert starts(tmp_path)[lost.arch.arch_hash] == 3, "Ray itself tries nothing again"
    assert any("goes again" in snapshot.note for snapshot in watcher.snapshots)
    check_books(spec)


def test_a_trial_that_is_lost_once_is_tried_again(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"kill_once": [1], "lose_once": [2]})
    outcome = run(spec, trials=4)
    assert outcome.last.complete == 4
    for number in (1, 2):
        trial = stored(spec)[number]
        assert states(trial) == [
            (AttemptState.FAILED, FailureClass.LOST),
            (AttemptState.DONE, None),
        ]
        assert len({attempt.token for attempt in trial.attempts}) == 2
        assert starts(tmp_path)[trial.arch.arch_hash] == 2
    check_books(spec)


def test_attempts_are_limited_by_the_study(tmp_path: Path) -> None:
    spec = changed(stub_study(tmp_path, orders={"lose": [0]}), "resources", attempts=2)
    run(spec, trials=1)
    assert len(stored(spec)[0].attempts) == 2


def test_duplicates_of_a_failed_trial_fail_with_it(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"diverge": [0, 1, 2, 3, 4]})
    spec = changed(spec, "search", sampler="random")
    model = spec.model.model_copy(update={"layers": spec.model.layers[:1], "width": (32,)})
    spec = spec.model_copy(update={"model": model})
    run(spec, trials=9)
    trials = stored(spec)
    copies = [one for one in trials if one.duplicate_of is not None and one.duplicate_of < 5]
    assert copies
    for copy in copies:
        assert copy.duplicate_of is not None
        assert copy.failure is trials[copy.duplicate_of].failure
    check_books(spec)


def test_a_trial_past_its_deadline_is_stopped(tmp_path: Path) -> None:
    """The trial waits for a lock that this test holds; nothing but the deadline can end it.

    The others take milliseconds, but a machine may be busy for seconds.
    """
    spec = stub_study(tmp_path, orders={"hold": [1]})
    spec = changed(spec, "resources", trial_timeout_s=10.0)
    with held(tmp_path):
        outcome = run(spec, trials=3)
    assert (outcome.last.complete, outcome.last.failed) == (2, 1)
    trial = stored(spec)[1]
    assert (trial.failure, trial.message) == (FailureClass.TIMED_OUT, "stopped after 10 s")
    assert states(trial) == [(AttemptState.FAILED, FailureClass.TIMED_OUT)]
    check_books(spec)


def test_weights_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    spec = changed(stub_study(tmp_path), "tracking", weights="/proc/weights")
    with pytest.raises(ServiceError, match="weights cannot be written to /proc/weights"):
        run(spec)
    with Store(spec.tracking.storage) as store:
        study = store.study("stub")
        assert (study.coordinator, study.stop_reason) == (None, "error")
    outcome = run(changed(spec, "tracking", weights=f"{tmp_path}/weights"))
    assert outcome.last.complete == 6
    assert "was in flight and runs again" in outcome.repaired[0]
    check_books(spec)


def test_a_worker_that_cannot_import_the_trial_ends_the_run(tmp_path: Path) -> None:
    from archsearch.coordinator import run_study

    spec = stub_study(tmp_path)
    with pytest.raises(ServiceError, match="needs the same archsearch"):
        run_study(spec, (), Watcher(), trial_function="no_such_module:run")
