"""Early stopping on a real Ray: the same search and the same stops, whatever happens on the way."""

import json
from pathlib import Path

import pytest
from service_cases import Driver, Watcher, check_books, held, run, stored, wait_for_end
from stub_trials import FUNCTION, pretended_recall, stub_study

from archsearch.cluster import Answer, Cluster
from archsearch.compose import walk
from archsearch.coordinator.book import Entry
from archsearch.coordinator.desk import Desk
from archsearch.coordinator.peers import peers_of
from archsearch.coordinator.repair import read_book
from archsearch.errors import FailureClass, StudyRefusedError
from archsearch.measures import profile_spec
from archsearch.messages import Peers, Started, Stopped, TrialRequest
from archsearch.propose.sampler import Proposer
from archsearch.records import AttemptState, TrialRecord, TrialState
from archsearch.spec import EarlyStopping, ResourcesSpec, StudySpec
from archsearch.stopping import decide, decision_rungs, point_of
from archsearch.store import Store

pytestmark = pytest.mark.usefixtures("ray_here")

TRIALS = 20
ORDERS = {"rungs": 8, "trials": TRIALS}
Story = list[tuple[str, str, int, str]]


def story(spec: StudySpec) -> Story:
    """What became of every trial: architecture, state, rungs, message."""
    return [
        (one.arch.arch_hash, str(one.state), len(one.rungs), one.message) for one in stored(spec)
    ]


def alone(folder: Path) -> StudySpec:
    """The study, run undisturbed in a folder of its own."""
    inner = folder / "alone"
    inner.mkdir()
    spec = stub_study(inner, orders=ORDERS)
    run(spec)
    return spec


def expected_stop(spec: StudySpec, trials: list[TrialRecord], one: TrialRecord) -> int | None:
    """The rung after which the rule stops a trial, from what is stored alone."""
    rule, rungs = spec.search.early_stopping, spec.train.rungs
    assert rule is not None

    def point(trial: TrialRecord, rung: int) -> tuple[float, ...]:
        recall = pretended_recall(trial.arch.arch_hash) * (rung + 1) / rungs
        return point_of(spec.objectives, recall, trial.metrics)

    known = [peer for peer in trials[: one.told] if peer.feasible or peer.state == "stopped"]
    for rung in decision_rungs(rule, rungs):
        peers = [point(peer, rung) for peer in known if len(peer.rungs) > rung]
        if not decide(rule, rung, rungs, point(one, rung), peers).goes_on:
            return rung
    return None


def test_trials_are_stopped_as_the_rule_says_and_all_is_accounted_for(tmp_path: Path) -> None:
    spec, watcher = stub_study(tmp_path, orders=ORDERS), Watcher()
    last = run(spec, watcher=watcher).last
    check_books(spec)
    trials = stored(spec)
    stopped = [trial for trial in trials if trial.state is TrialState.STOPPED]
    assert len(stopped) >= TRIALS // 4
    assert last.evaluated == TRIALS
    assert last.complete + len(stopped) == TRIALS
    for trial in trials:
        if trial.state in (TrialState.STOPPED, TrialState.COMPLETE):
            rung = expected_stop(spec, trials, trial)
            assert (rung is not None) == (trial.state is TrialState.STOPPED)
            assert len(trial.rungs) == (8 if rung is None else rung + 1)
    for trial in stopped:
        assert trial.evaluation is None and trial.profile is None and not trial.feasible
        assert "recall" not in trial.metrics and "state_bytes" in trial.metrics
        assert f"at rung {len(trial.rungs)} of 8, of which the best" in trial.message
        assert [one.state for one in trial.attempts] == [AttemptState.DONE]
    said = [one.note for one in watcher.snapshots if "was stopped early" in one.note]
    assert len(said) == len(stopped)


def test_the_same_study_stops_the_same_trials_whatever_finishes_first(tmp_path: Path) -> None:
    jittered = stub_study(tmp_path, orders={**ORDERS, "jitter_s": 0.2})
    run(jittered)
    assert story(jittered) == story(alone(tmp_path))


def test_a_trial_killed_between_rungs_is_held_against_the_same_peers(tmp_path: Path) -> None:
    undisturbed = story(alone(tmp_path))
    stopped = [n for n, one in enumerate(undisturbed) if one[1] == "stopped"]
    whole = [n for n, one in enumerate(undisturbed) if one[1] == "complete"]
    chosen = [stopped[0], stopped[-1], whole[-1]]
    # The second rung decides: who is to be stopped there never gets to be killed.
    spec = stub_study(
        tmp_path, orders={**ORDERS, "kill_at_rung_once": chosen, "kill_once": stopped}
    )
    run(spec)
    check_books(spec)
    assert story(spec) == undisturbed
    for number in (*stopped, whole[-1]):
        lost, done = stored(spec)[number].attempts
        assert (lost.failure, done.state) == (FailureClass.LOST, AttemptState.DONE)


def test_a_coordinator_killed_in_the_middle_goes_on_with_the_same_search(tmp_path: Path) -> None:
    undisturbed = story(alone(tmp_path))
    stops = [n for n, one in enumerate(undisturbed) if one[1] == "stopped"]
    orders = {**ORDERS, "hold": [stops[1], stops[1] + 1]}
    with held(tmp_path):
        coordinator = Driver(tmp_path, orders)
        try:
            workers = coordinator.wait_until_held()
        finally:
            coordinator.end()
    assert all(wait_for_end(pid) for pid in workers)
    spec = stub_study(tmp_path, orders=orders)
    assert 0 < sum(trial.state.is_final for trial in stored(spec)) < TRIALS
    run(spec)
    check_books(spec)
    assert story(spec) == undisturbed


@pytest.mark.parametrize("written", [False, True])
def test_a_coordinator_that_dies_while_it_notes_a_stop_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Either before the ledger knows of the stop, or after it and before Optuna's tables do."""
    spec = stub_study(tmp_path, orders=ORDERS)
    stopped: list[int] = []

    def die(desk: Desk, entry: Entry, *_: object) -> None:
        if entry.state is TrialState.STOPPED or not written:
            stopped.append(entry.number)
            raise RuntimeError("killed here")
        told(desk, entry, "")

    told = Desk.tell_mirror
    monkeypatch.setattr(Desk, "tell_mirror" if written else "stop", die)
    with pytest.raises(RuntimeError, match="killed here"):
        run(spec)
    monkeypatch.undo()
    repaired = "; ".join(run(spec).repaired)
    said = "had ended; Optuna's tables say so now" if written else "was in flight and runs again"
    assert f"trial {stopped[0]} {said}" in repaired
    check_books(spec)
    assert story(spec) == story(alone(tmp_path))
    assert len(stored(spec)[stopped[0]].attempts) == (1 if written else 2)


def test_peers_are_the_same_after_a_restart(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders=ORDERS)
    run(spec)
    with Store(spec.tracking.storage) as store:
        records, sampler = store.trials(spec.study), store.study(spec.study).sampler
    book = read_book(spec, records, Proposer(spec, sampler))
    for record in records:
        peers = peers_of(spec, book, book[record.number])
        assert peers is not None
        assert peers.known == record.metrics
        known = [one for one in records[: record.told] if one.duplicate_of is None and one.rungs]
        assert {rung: len(points) for rung, points in peers.points.items()} == {
            rung: sum(len(one.rungs) > rung for one in known) for rung in (1, 5)
        }
    assert max(record.told for record in records) > TRIALS // 2


def test_early_stopping_may_not_change_when_a_study_goes_on(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders=ORDERS)
    run(spec, trials=1)
    plain = json.loads(spec.model_dump_json())
    plain["search"]["early_stopping"] = {"reduction": 2.0}
    with pytest.raises(StudyRefusedError, match=r"search\.early_stopping"):
        run(StudySpec.model_validate(plain), trials=2)


def test_a_stopped_trial_gives_its_device_back_within_a_second(tmp_path: Path) -> None:
    """Its process ends, and with it all that it holds of the device."""
    spec = stub_study(tmp_path, orders=ORDERS)
    arch = next(walk(spec.model)).arch
    better = ((-1.0, 0.0),) * 4
    request = TrialRequest(
        study=spec.study,
        number=0,
        token="to be stopped",
        arch=arch,
        task=spec.task,
        train=spec.train,
        profile=profile_spec(spec, exclusive=True),
        seed=0,
        device="cpu",
        peers=Peers(
            rule=EarlyStopping(),
            objectives=spec.objectives,
            known={"state_bytes": 1e9},
            points={1: better},
        ),
    )
    cluster = Cluster(ResourcesSpec(gpus=1), None, FUNCTION)
    cluster.submit(request)
    pid = 0
    while True:
        events = [one.event for one in cluster.wait(60) if isinstance(one, Answer)]
        pid = next((one.pid for one in events if isinstance(one, Started)), pid)
        if any(isinstance(one, Stopped) for one in events):
            break
    assert wait_for_end(pid, timeout_s=1.0)
