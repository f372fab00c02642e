"""A coordinator on a real Ray and a real database: budgets, order, duplicates, caches, refusals."""

import hashlib
import itertools
from pathlib import Path

import pytest
from service_cases import Watcher, check_books, run, starts, stored
from stub_trials import DEVICE_MODEL, changed, pretended_recall, stub_study

from archsearch.compose import walk
from archsearch.coordinator.nexts import STUCK_SMALL
from archsearch.errors import StudyRefusedError, UsageError
from archsearch.front import hypervolume_of, ranked
from archsearch.gate import gate
from archsearch.messages import PluginFile
from archsearch.model_spec import ModelSpec, Option, Slot
from archsearch.records import TrialState
from archsearch.spec import Limit, StudySpec, StudyStart
from archsearch.store import Store

pytestmark = pytest.mark.usefixtures("ray_here")


def proposed(spec: StudySpec) -> list[str]:
    return [trial.arch.arch_hash for trial in stored(spec)]


def one_slot(spec: StudySpec, **fields: tuple[int, ...]) -> StudySpec:
    """The study on a tiny space: one sliding window with these fields."""
    slot = Slot(options=(Option(mixer="sliding_window", fields=dict(fields)),))
    return spec.model_copy(update={"model": ModelSpec(width=(32,), layers=(slot,))})


def test_a_study_runs_to_its_budget(tmp_path: Path) -> None:
    spec, watcher = stub_study(tmp_path), Watcher()
    outcome = run(spec, watcher=watcher)
    assert (outcome.stop_reason, outcome.repaired) == ("trials", ())
    check_books(spec)
    complete = [trial for trial in stored(spec) if trial.state is TrialState.COMPLETE]
    assert len(complete) == outcome.last.evaluated == 6
    for trial in complete:
        assert trial.metrics["recall"] == pretended_recall(trial.arch.arch_hash)
        assert {"state_bytes", "parameters", "decode_ms", "prefill_ms"} <= set(trial.metrics)
        assert [attempt.pid is not None for attempt in trial.attempts] == [True]
        assert len(trial.rungs) == 1
        assert trial.weights_path is not None
        assert Path(trial.weights_path).read_bytes() == b"pretended weights"
    with Store(spec.tracking.storage) as store:
        study = store.study("stub")
        assert (study.coordinator, study.stop_reason) == (None, "trials")
        assert study.device_model == DEVICE_MODEL
        assert study.reference["recall"] == 0.0
        assert outcome.last.hypervolume == hypervolume_of(study, store.trials("stub")) > 0
    assert any(snapshot.running for snapshot in watcher.snapshots)
    counts = [snapshot.evaluated for snapshot in watcher.snapshots]
    assert counts == sorted(counts)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 6


def test_weights_are_recorded_with_their_digest(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    run(spec, trials=1)
    with Store(spec.tracking.storage) as store, store.database.reading() as connection:
        (digest,) = connection.exec_driver_sql(
            "SELECT weights_sha256 FROM archsearch_evaluations"
        ).one()
    assert digest == hashlib.sha256(b"pretended weights").hexdigest()


@pytest.mark.parametrize("sampler", ["tpe", "evolution"])
def test_the_same_seed_searches_the_same_way_whatever_finishes_first(
    tmp_path: Path, sampler: str
) -> None:
    """Twice in parallel, with random durations; then once more, interrupted in between."""
    found = []
    for name, budgets in (("a", [16]), ("b", [16]), ("c", [5, 11, 16])):
        folder = tmp_path / name
        folder.mkdir()
        spec = stub_study(folder, orders={"jitter_s": 0.15})
        spec = changed(spec, "search", sampler=sampler)
        for budget in budgets:
            run(spec, trials=budget)
        check_books(spec)
        found.append(proposed(spec))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) >= 16


def test_a_larger_budget_goes_on_and_a_spent_one_does_nothing(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    run(spec, trials=3)
    run(spec, trials=5)
    before = starts(tmp_path).total()
    outcome = run(spec, trials=5)
    assert (outcome.stop_reason, outcome.last.evaluated) == ("trials", 5)
    assert starts(tmp_path).total() == before == 5
    check_books(spec)


def test_a_time_budget_ends_the_study_and_counts_all_runs(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    # Long enough for a first worker to start, too short for the 180 architectures of the space.
    budget_s = 2.0
    outcome = run(spec, trials=1000, time_s=budget_s)
    assert outcome.stop_reason == "time"
    done = outcome.last.evaluated
    assert 0 < done < 1000
    again = run(spec, trials=1000, time_s=budget_s)
    assert (again.stop_reason, again.last.evaluated) == ("time", done)
    assert run(spec, trials=done + 2).stop_reason == "trials"
    check_books(spec)


def test_an_architecture_is_never_trained_twice(tmp_path: Path) -> None:
    spec = changed(stub_study(tmp_path), "search", sampler="random")
    spec = one_slot(spec, window=(4, 8, 16, 32), heads=(1, 2))
    run(spec, trials=8)
    trials = stored(spec)
    assert set(starts(tmp_path).values()) == {1}
    assert len(starts(tmp_path)) == 8
    copies = [trial for trial in trials if trial.state is TrialState.DUPLICATE]
    assert copies, "a random search of a space of eight repeats itself"
    for copy in copies:
        assert copy.duplicate_of is not None
        leader = trials[copy.duplicate_of]
        assert (copy.metrics, copy.arch.arch_hash) == (leader.metrics, leader.arch.arch_hash)
    check_books(spec)


def test_a_space_that_is_used_up_ends_the_study(tmp_path: Path) -> None:
    spec = changed(stub_study(tmp_path), "search", sampler="random")
    spec = one_slot(spec, window=(4, 8, 16, 32), heads=(1, 2))
    outcome = run(spec, trials=50)
    assert outcome.stop_reason == "space exhausted"
    assert starts(tmp_path) == dict.fromkeys((one.arch.arch_hash for one in walk(spec.model)), 1)
    is_copy = [trial.state is TrialState.DUPLICATE for trial in stored(spec)]
    longest = max(len(list(run_)) for copy, run_ in itertools.groupby(is_copy) if copy)
    assert longest <= STUCK_SMALL, "what is left is looked up, not waited for"
    check_books(spec)


def test_infeasible_architectures_cost_nothing_and_are_told(tmp_path: Path) -> None:
    spec = one_slot(stub_study(tmp_path), window=(4, 8, 16, 32), heads=(1, 2))
    limited = spec.model_copy(update={"limits": (Limit(metric="state_bytes", maximum=3000),)})
    outcome = run(limited, trials=50)
    small = {one.arch.arch_hash for one in walk(spec.model) if gate(one.arch, limited).is_open}
    assert outcome.stop_reason == "space exhausted"
    assert set(starts(tmp_path)) == small
    assert 0 < len(small) < 8
    excluded = [trial for trial in stored(limited) if trial.state is TrialState.INFEASIBLE]
    assert excluded
    assert all("the limit is 3,000" in trial.violations[0] for trial in excluded)
    check_books(limited)


def test_a_space_without_anything_feasible_ends_at_once(tmp_path: Path) -> None:
    spec = one_slot(stub_study(tmp_path), window=(4, 8), heads=(1, 2))
    limited = spec.model_copy(update={"limits": (Limit(metric="state_bytes", maximum=1),)})
    outcome = run(limited)
    assert (outcome.stop_reason, outcome.last.complete) == ("space exhausted", 0)


def test_a_limit_on_what_is_measured_makes_a_complete_trial_infeasible(tmp_path: Path) -> None:
    spec = stub_study(tmp_path).model_copy(
        update={"limits": (Limit(metric="decode_ms", maximum=1.0),)}
    )
    outcome = run(spec, trials=2)
    assert outcome.last.complete == 2
    assert outcome.last.best == ()
    for trial in stored(spec):
        assert trial.state is TrialState.COMPLETE and not trial.feasible
        assert trial.violations == ("decode_ms at batch 1, context 32 is 1.5; the limit is 1",)
    check_books(spec)


def test_warm_start_comes_first(tmp_path: Path) -> None:
    names = ("smallest", "largest")
    spec = changed(stub_study(tmp_path), "search", warm_start=names, sampler="random")
    run(spec, trials=4)
    sizes = sorted(gate(one.arch, spec).metrics["state_bytes"] for one in walk(spec.model))
    first, second = (trial.metrics["state_bytes"] for trial in stored(spec)[:2])
    assert (first, second) == (sizes[0], sizes[-1])


def test_a_study_begins_with_the_front_of_another(tmp_path: Path) -> None:
    """Looked up once: what the other study finds later changes nothing."""
    run(changed(stub_study(tmp_path, "one"), "search", sampler="random"), trials=8)
    with Store(stub_study(tmp_path).tracking.storage) as store:
        ranks = ranked(store.study("one"), store.trials("one"))
    front = [trial.arch.arch_hash for trial, rank in ranks if rank == 0]
    assert 1 < len(front) < 8
    worst = next(trial for trial, rank in ranks if rank > 0)
    starts = (
        StudyStart(study="one", trials=(worst.number,)),
        "smallest",
        StudyStart(study="one"),
    )
    two = changed(stub_study(tmp_path, "two"), "search", warm_start=starts, sampler="random")
    run(two, trials=2)
    run(changed(stub_study(tmp_path, "one"), "search", sampler="random"), trials=16)
    run(two, trials=len(front) + 3)
    found = proposed(two)
    assert found[0] == worst.arch.arch_hash
    first = dict.fromkeys([found[0], found[1], *front])
    assert found[: len(first)] == [*first]
    check_books(two)


def test_a_study_that_is_not_there_cannot_be_begun_with(tmp_path: Path) -> None:
    run(stub_study(tmp_path, "one"), trials=2)
    nothing = (Limit(metric="state_bytes", maximum=1),)
    run(one_slot(stub_study(tmp_path, "empty")).model_copy(update={"limits": nothing}))
    for start, said in (
        (StudyStart(study="on"), "no study 'on' in .*; did you mean 'one'\\?"),
        (StudyStart(study="one", trials=(9,)), "study 'one' has no trial 9; it has numbers 0 to 1"),
        (StudyStart(study="empty"), "study 'empty' has no complete trial within its limits yet"),
    ):
        two = changed(stub_study(tmp_path, "two"), "search", warm_start=(start,))
        with pytest.raises(UsageError, match=said):
            run(two)


def test_results_are_reused_by_another_study(tmp_path: Path) -> None:
    run(stub_study(tmp_path, "one"), trials=6)
    trained = starts(tmp_path).total()
    other = stub_study(tmp_path, "two")
    outcome = run(other, trials=6)
    assert outcome.last.complete == 6
    assert starts(tmp_path).total() == trained, "nothing is trained again"
    # Until the first worker has said what device it is, its profile cannot be looked up.
    assert starts(tmp_path, "profiled").total() <= 2
    assert outcome.last.from_cache >= 4
    assert proposed(other) == proposed(stub_study(tmp_path, "one"))
    check_books(other)


def test_a_changed_study_is_refused(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    run(spec, trials=1)
    with pytest.raises(StudyRefusedError, match="these parts differ: seed, train\\."):
        run(changed(spec, "train", epochs=5).model_copy(update={"seed": 1}))
    with pytest.raises(StudyRefusedError, match="these parts differ: plugins\\."):
        run(spec, plugins=(PluginFile(name="mine", source="1"),))
