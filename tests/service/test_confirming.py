"""Members of the front are trained again with fresh seeds, until the whole front is."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from service_cases import Watcher, check_books, run, starts, stored
from stub_trials import changed, fresh_recall, pretended_recall, stub_study

from archsearch.front import confirmed
from archsearch.pareto import ranks
from archsearch.records import AttemptState, TrialRecord
from archsearch.spec import StudySpec
from archsearch.store import Store

pytestmark = pytest.mark.usefixtures("ray_here")

TRIALS, SEEDS = 12, 3


def study(folder: Path, orders: Mapping[str, object] | None = None, name: str = "s") -> StudySpec:
    spec = stub_study(folder, name, {"trials": TRIALS, **(orders or {})})
    return changed(spec, "search", confirm=SEEDS)


def front_of(trials: list[TrialRecord], recall: Mapping[int, float]) -> set[int]:
    """Numbers of the front if these are the recalls."""
    feasible = [one for one in trials if one.feasible]
    found = ranks([(-recall[one.number], one.metrics["state_bytes"]) for one in feasible])
    return {one.number for one, rank in zip(feasible, found, strict=True) if rank == 0}


def expected(trials: list[TrialRecord]) -> tuple[set[int], set[int]]:
    """Which trials have to be confirmed, and which of them are on the front then."""
    recall = {one.number: pretended_recall(one.arch.arch_hash) for one in trials}
    done: set[int] = set()
    while new := front_of(trials, recall) - done:
        done |= new
        recall |= {number: fresh_recall(trials[number].arch.arch_hash) for number in new}
    return done, front_of(trials, recall)


def confirmed_front(spec: StudySpec) -> set[int]:
    with Store(spec.tracking.storage) as store:
        found = confirmed(store.study(spec.study), store.trials(spec.study))
    return {trial.number for trial in found}


def test_the_front_is_confirmed_until_every_member_is(tmp_path: Path) -> None:
    spec, watcher = study(tmp_path), Watcher()
    last = run(spec, watcher=watcher).last
    check_books(spec)
    trials = stored(spec)
    done, front = expected(trials)
    assert len(done) > len(front) > 0  # some lost their place, and others took it
    assert {one.number for one in trials if one.confirmation is not None} == done
    assert confirmed_front(spec) == front
    assert last.complete == TRIALS and last.evaluated == TRIALS
    for number in done:
        again = trials[number].confirmation
        assert again is not None and len(again.members) == SEEDS
        assert again.recipe_hash != trials[number].evaluation.recipe_hash  # type: ignore[union-attr]
        assert [one.state for one in trials[number].attempts] == [AttemptState.DONE] * 2
        assert trials[number].metrics["recall"] == pretended_recall(trials[number].arch.arch_hash)
    said = [one.note for one in watcher.snapshots if "is confirmed: recall" in one.note]
    assert len(said) == len(done) and f"over {SEEDS} fresh seeds" in said[0]


def test_what_is_searched_does_not_depend_on_it_and_it_can_come_later(tmp_path: Path) -> None:
    spec = study(tmp_path)
    plain = changed(spec, "search", confirm=0)
    run(plain)
    searched = stored(plain)
    assert all(one.confirmation is None for one in searched)
    before = starts(tmp_path)
    run(spec)  # the same study, now with confirmation
    trials = stored(spec)
    assert [one.arch for one in trials] == [one.arch for one in searched]
    done, front = expected(trials)
    assert confirmed_front(spec) == front
    assert sum((starts(tmp_path) - before).values()) == len(done)
    after = starts(tmp_path)
    run(spec)
    assert starts(tmp_path) == after


def test_another_study_takes_what_is_known_of_fresh_seeds(tmp_path: Path) -> None:
    first, second = study(tmp_path), study(tmp_path, name="t")
    run(first)
    before = starts(tmp_path)
    run(second)
    assert starts(tmp_path) == before
    assert confirmed_front(second) == confirmed_front(first)


def test_a_worker_that_is_lost_meanwhile_is_replaced(tmp_path: Path) -> None:
    spec = study(tmp_path, {"confirming": "kill"})
    run(spec)
    trials = stored(spec)
    done, front = expected(trials)
    assert confirmed_front(spec) == front
    states = [AttemptState.DONE, AttemptState.FAILED, AttemptState.DONE]
    for number in done:
        assert [one.state for one in trials[number].attempts] == states


def test_what_cannot_be_confirmed_is_left_out_and_keeps_its_result(tmp_path: Path) -> None:
    spec, watcher = study(tmp_path, {"confirming": "diverge"}), Watcher()
    outcome = run(spec, watcher=watcher)
    assert outcome.stop_reason == "trials"
    check_books(spec)
    assert confirmed_front(spec) == set()
    assert all(one.confirmation is None and one.failure is None for one in stored(spec))
    assert any("cannot be confirmed (diverged)" in one.note for one in watcher.snapshots)


def test_the_front_is_confirmed_when_the_time_is_up(tmp_path: Path) -> None:
    spec = study(tmp_path)
    run(changed(spec, "search", confirm=0), trials=6)
    outcome = run(spec, time_s=0.001)
    assert outcome.stop_reason == "time"
    trials = stored(spec)
    assert len(trials) < TRIALS
    assert confirmed_front(spec) == expected(trials)[1] != set()
