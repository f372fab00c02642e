"""Processes that are killed or stopped in the middle of a study, and the run that goes on after."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_cases import (
    Driver,
    Watcher,
    check_books,
    held,
    optuna_trials,
    run,
    starts,
    stored,
    wait_for_end,
)
from stub_trials import stub_study
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.cluster import BEAT_S
from archsearch.errors import FailureClass, StudyRefusedError
from archsearch.records import AttemptState, TrialState
from archsearch.snapshot import Snapshot
from archsearch.store import Store
from archsearch.store.holder import Holder

HOLD = {"hold": [2, 3]}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(**settings: bool) -> Driver:
        started.append(Driver(tmp_path, HOLD, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()


def command_of(pid: int) -> str:
    """What a process runs; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def finish(folder: Path) -> None:
    """Go on here with the study that the driver began, and look at all it left."""
    spec = stub_study(folder, orders=HOLD)
    assert run(spec).last.complete == 6
    check_books(spec)
    alone = folder / "alone"
    alone.mkdir()
    undisturbed = stub_study(alone)
    run(undisturbed)
    assert [one.arch for one in stored(spec)] == [one.arch for one in stored(undisturbed)]


@pytest.mark.usefixtures("ray_here")
def test_kill_9_of_the_coordinator_loses_only_what_was_in_flight(
    tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    with held(tmp_path):
        coordinator = driver()
        workers = coordinator.wait_until_held()
        family = {pid: command_of(pid) for pid in coordinator.children()}
        refused = stub_study(tmp_path, orders=HOLD)
        with pytest.raises(StudyRefusedError, match=f"pid {coordinator.process.pid}"):
            run(refused)
        coordinator.process.kill()
        coordinator.process.wait()
    assert set(workers) <= set(family)
    for pid, command in family.items():
        if "raylet" in command or "gcs_server" in command or pid in workers:
            assert wait_for_end(pid), f"left behind: {command}"

    before = {one.number for one in stored(refused) if one.state is TrialState.COMPLETE}
    assert before == {0, 1}
    finish(tmp_path)
    for trial in stored(refused):
        attempts = [(one.state, one.failure) for one in trial.attempts]
        lost = [(AttemptState.FAILED, FailureClass.LOST)] if trial.number in (2, 3) else []
        assert attempts == [*lost, (AttemptState.DONE, None)]


@pytest.mark.usefixtures("ray_here")
def test_ctrl_c_stops_cleanly_and_the_next_run_goes_on(
    tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    spec = stub_study(tmp_path, orders=HOLD)
    with held(tmp_path):
        coordinator = driver()
        coordinator.wait_until_held()
        # As a terminal does it: to the workers and to Ray, too.
        os.killpg(coordinator.process.pid, signal.SIGINT)
        outcome = coordinator.read_until(lambda said: "reason" in said)
        assert coordinator.process.wait(30) == 0
    assert outcome["reason"] == "interrupted"
    assert "run the same command again" in outcome["message"]
    with Store(spec.tracking.storage) as store:
        study = store.study("stub")
        assert (study.coordinator, study.stop_reason) == (None, "interrupted")
    assert not [one for one in optuna_trials(spec) if not one.state.is_finished()]
    assert [one.state for one in stored(spec)[2:4]] == [TrialState.PENDING] * 2
    finish(tmp_path)


def test_a_second_ctrl_c_ends_the_process_at_once(
    tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """The publisher of this coordinator would wait for ever."""
    with held(tmp_path):
        coordinator = driver(stuck=True)
        coordinator.wait_until_held()
        coordinator.process.send_signal(signal.SIGTERM)
        coordinator.read_until(lambda said: "stuck" in said)
        coordinator.process.send_signal(signal.SIGINT)
        assert coordinator.process.wait(10) == 130


class Saboteur(Watcher):
    """Does something once a trial runs on a worker."""

    def __init__(self, number: int, deed: Callable[[int], None]) -> None:
        super().__init__()
        self._number = number
        self._deed = deed
        self._done = False

    def on_event(self, snapshot: Snapshot) -> None:
        super().on_event(snapshot)
        workers = {one.number: one.worker for one in snapshot.running}
        if not self._done and workers.get(self._number):
            self._done = True
            self._deed(int(workers[self._number].split()[-1]))


@pytest.mark.usefixtures("ray_here")
def test_kill_9_of_a_worker_is_a_lost_attempt_and_the_trial_goes_again(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"hold": [1]})
    with held(tmp_path) as lock:

        def kill(worker: int) -> None:
            os.kill(worker, signal.SIGKILL)
            lock.close()  # the second attempt need not wait

        outcome = run(spec, trials=3, watcher=Saboteur(1, kill))
    assert outcome.last.complete == 3
    attempts = [(one.state, one.failure) for one in stored(spec)[1].attempts]
    assert attempts == [(AttemptState.FAILED, FailureClass.LOST), (AttemptState.DONE, None)]
    assert starts(tmp_path)[stored(spec)[1].arch.arch_hash] == 2
    check_books(spec)


@pytest.mark.usefixtures("ray_here")
def test_kill_9_of_ray_itself_fails_no_trial(driver: Callable[..., Driver], tmp_path: Path) -> None:
    with held(tmp_path):
        first = driver()
        first.wait_until_held()
        (raylet,) = [pid for pid in first.children() if "/raylet/raylet " in command_of(pid)]
        os.kill(raylet, signal.SIGKILL)
    # Workers that are up notice it after a while, some only when they have done all that is left.
    with pytest.raises(AssertionError, match=r"the coordinator ended with [01]"):
        first.read_until(lambda _said: False)
    states = {one.state for one in stored(stub_study(tmp_path, orders=HOLD))}
    assert TrialState.FAILED not in states
    finish(tmp_path)


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("way", ["stop", "hangup"])
def test_another_shell_or_a_closed_terminal_stops_it_cleanly(
    tmp_path: Path, driver: Callable[..., Driver], way: str
) -> None:
    spec = stub_study(tmp_path, orders=HOLD)
    with held(tmp_path):
        coordinator = driver()
        coordinator.wait_until_held()
        if way == "hangup":
            coordinator.process.send_signal(signal.SIGHUP)
        else:
            said = CliRunner().invoke(app, ["stop", "--storage", spec.tracking.storage])
            assert "study 'stub' has stopped; go on with: archsearch resume stub" in said.output
        outcome = coordinator.read_until(lambda said: "reason" in said)
        assert coordinator.process.wait(30) == 0
    assert outcome["reason"] == {"stop": "stopped", "hangup": "interrupted"}[way]
    with Store(spec.tracking.storage) as store:
        assert (store.study("stub").coordinator, store.study("stub").request) == (None, None)
    finish(tmp_path)


def test_a_stopped_worker_is_given_up_and_its_trial_goes_again(
    tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray calls it running: its process exists, and its connection is open."""
    lease_s = 3 * BEAT_S
    monkeypatch.setattr("archsearch.coordinator.loop.LEASE_S", lease_s)
    spec = stub_study(tmp_path, orders={"hold": [1]})
    with held(tmp_path) as lock:

        def freeze(worker: int) -> None:
            os.kill(worker, signal.SIGSTOP)
            lock.close()  # the second attempt need not wait

        outcome = run(spec, trials=3, watcher=Saboteur(1, freeze))
    assert outcome.last.complete == 3
    first, second = stored(spec)[1].attempts
    assert (first.state, first.failure) == (AttemptState.FAILED, FailureClass.LOST)
    assert first.message == f"its worker showed no sign of life for {lease_s:g} s"
    assert first.device_seconds > lease_s and second.device_seconds < lease_s
    assert second.state is AttemptState.DONE and second.token != first.token
    check_books(spec)


@pytest.mark.usefixtures("ray_here")
def test_a_coordinator_that_lost_its_study_stops_and_writes_nothing(tmp_path: Path) -> None:
    """As after a suspended laptop wakes up: somebody else took the study over meanwhile."""
    spec = stub_study(tmp_path, orders={"hold": [1]})
    before: list[Any] = []
    with held(tmp_path) as lock:

        def take_over(_worker: int) -> None:
            thief = json.dumps(Holder("other-host", 17, "1", "elsewhere").plain())
            with Store(spec.tracking.storage) as store, store.database.writing() as connection:
                connection.exec_driver_sql(
                    "UPDATE archsearch_studies SET lease_token = 'theirs', lease_holder = ?",
                    (thief,),
                )
            before.extend(stored(spec))
            lock.close()

        with pytest.raises(StudyRefusedError, match="other-host pid 17 holds it now"):
            run(spec, watcher=Saboteur(1, take_over))
    assert stored(spec) == before
    with Store(spec.tracking.storage) as store:
        assert store.study("stub").coordinator == "other-host pid 17"
