"""What is asked of a study from outside: pause, another budget, failed trials again."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from service_cases import Watcher, check_books, held, run, starts, stored
from stub_trials import changed, stub_study

from archsearch.errors import FailureClass, StudyRefusedError, UsageError
from archsearch.records import AttemptState, Request, TrialState
from archsearch.snapshot import Snapshot
from archsearch.spec import StudySpec
from archsearch.store import Store, control

pytestmark = pytest.mark.usefixtures("ray_here")


class Script(Watcher):
    """Does one thing after the other, each once what it waits for is seen."""

    def __init__(self, *steps: tuple[Callable[[Snapshot], bool], Callable[[], object]]) -> None:
        super().__init__()
        self._steps = list(steps)

    @property
    def is_done(self) -> bool:
        return not self._steps

    def on_event(self, snapshot: Snapshot) -> None:
        super().on_event(snapshot)
        if self._steps and self._steps[0][0](snapshot):
            self._steps.pop(0)[1]()


def ask(spec: StudySpec, request: Request | None) -> control.Asked:
    with Store(spec.tracking.storage) as store:
        return control.ask(store, spec.study, request)


def set_budget(spec: StudySpec, **search: object) -> None:
    with Store(spec.tracking.storage) as store:
        assert control.set_budget(store, spec.study, search, {}) is not None


def retry(
    spec: StudySpec, *numbers: int, failure: FailureClass | None = None, study: str = "stub"
) -> list[int]:
    with Store(spec.tracking.storage) as store:
        return control.retry(store, study, failure, numbers)


def test_a_pause_lets_running_trials_finish_and_starts_nothing(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"hold": [1]})
    begun: list[int] = []
    with held(tmp_path) as lock:

        def stands(seen: Snapshot) -> bool:
            return not seen.running and sum(not one.running for one in script.snapshots[-4:]) == 4

        def go_on() -> None:
            begun.append(starts(tmp_path).total())
            assert ask(spec, None).before is Request.PAUSE

        script = Script(
            (lambda seen: 1 in [one.number for one in seen.running], lambda: pause(spec)),
            (lambda seen: seen.note.startswith("paused"), lock.close),
            (stands, go_on),
        )
        outcome = run(spec, trials=8, watcher=script)
    assert script.is_done
    notes = [one.note for one in script.snapshots]
    assert "paused; go on with: archsearch resume stub" in notes and "goes on" in notes
    assert (outcome.stop_reason, outcome.last.complete) == ("trials", 8)
    assert 2 <= begun[0] < 8 == starts(tmp_path).total()
    check_books(spec)
    undisturbed = stub_study(tmp_path, "other")
    run(undisturbed, trials=8)
    assert [one.arch for one in stored(spec)] == [one.arch for one in stored(undisturbed)]


def pause(spec: StudySpec) -> None:
    assert ask(spec, Request.PAUSE).holder is not None


def test_time_in_a_pause_is_not_time_of_the_study(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    stood_s = 1.0
    since: list[float] = []
    script = Script(
        (lambda seen: seen.evaluated > 0, lambda: pause(spec)),
        (lambda seen: seen.note.startswith("paused"), lambda: None),
        (lambda seen: not seen.running, lambda: since.append(time.monotonic())),
        (lambda _seen: time.monotonic() - since[0] > stood_s, lambda: ask(spec, None)),
    )
    began = time.monotonic()
    run(changed(spec, "search", trials=100), watcher=script)
    took_s = time.monotonic() - began
    assert script.is_done
    with Store(spec.tracking.storage) as store:
        assert store.study("stub").seconds_run < took_s - stood_s


def test_a_smaller_budget_ends_a_running_study(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"hold": [3]})
    with held(tmp_path) as lock:
        script = Script(
            (lambda seen: 3 in [one.number for one in seen.running], lambda: smaller(spec)),
            (lambda seen: seen.trials == 4, lock.close),
        )
        outcome = run(spec, trials=100, watcher=script)
    assert outcome.message == "study 'stub': all 4 trials are done"
    assert 4 <= outcome.last.evaluated <= 3 + 4, "what was proposed already is evaluated"
    with Store(spec.tracking.storage) as store:
        assert store.study("stub").spec.search.trials == 4
    check_books(spec)


def smaller(spec: StudySpec) -> None:
    set_budget(spec, trials=4)


def test_a_larger_budget_lets_a_running_study_go_on(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"hold": [1]})
    with held(tmp_path) as lock:
        script = Script(
            (
                lambda seen: 1 in [one.number for one in seen.running],
                lambda: set_budget(spec, trials=5),
            ),
            (lambda seen: seen.trials == 5, lock.close),
        )
        outcome = run(spec, trials=2, watcher=script)
    assert (outcome.stop_reason, outcome.last.complete) == ("trials", 5)


def test_too_many_failures_end_a_study_and_a_retry_evaluates_them_again(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"diverge_once": [1, 2], "lose": [3]})
    spec = changed(spec, "search", failures=2)
    outcome = run(spec, trials=8)
    assert outcome.stop_reason == "failures"
    assert "2 failed trials end it; archsearch retry stub" in outcome.message
    failed = [one.number for one in stored(spec) if one.state is TrialState.FAILED]
    assert len(failed) >= 2 and outcome.last.evaluated < 8
    assert run(spec, trials=8).stop_reason == "failures", "it stays ended"
    assert retry(spec) == failed
    spec = changed(spec, "search", failures=None)
    assert run(spec, trials=8).stop_reason == "trials"
    for number in (1, 2):
        trial = stored(spec)[number]
        states = [(one.state, one.failure) for one in trial.attempts]
        again = [(AttemptState.FAILED, FailureClass.DIVERGED), (AttemptState.DONE, None)]
        assert (states, trial.state, trial.failure) == (again, TrialState.COMPLETE, None)
    check_books(spec)


def test_proposals_after_a_retry_are_the_same_however_often_it_is_interrupted(
    tmp_path: Path,
) -> None:
    """Trial 3 diverges, is known as failed when 10 and later are proposed, and is then retried."""
    found = []
    for name, budgets in (("a", [20]), ("b", [13, 16, 20])):
        folder = tmp_path / name
        folder.mkdir()
        spec = stub_study(folder, orders={"jitter_s": 0.1, "diverge_once": [3]})
        run(spec, trials=12)
        assert retry(spec) == [3]
        for budget in budgets:
            run(spec, trials=budget)
        check_books(spec)
        found.append([one.arch.arch_hash for one in stored(spec)])
    assert found[0] == found[1]


def test_a_retry_takes_duplicates_along_and_only_what_it_should(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"diverge_once": [0, 1, 2, 3, 4], "exhaust": [6]})
    spec = changed(spec, "search", sampler="random")
    model = spec.model.model_copy(update={"layers": spec.model.layers[:1], "width": (32,)})
    spec = spec.model_copy(update={"model": model})
    run(spec, trials=9)
    before = stored(spec)
    copies = [one.number for one in before if one.duplicate_of is not None and one.failure]
    failed = [one.number for one in before if one.state is TrialState.FAILED]
    memory = [one for one in failed if before[one].failure is FailureClass.OUT_OF_MEMORY]
    assert copies and memory
    with pytest.raises(UsageError, match=r"no failed trials \(lost\): 0; those that are: none"):
        retry(spec, 0, failure=FailureClass.LOST)
    with pytest.raises(UsageError, match="no study 'other'"):
        retry(spec, study="other")
    assert retry(spec, failure=FailureClass.DIVERGED) == [
        one for one in failed if one not in memory
    ]
    assert retry(spec, failure=FailureClass.DIVERGED) == []
    pending = {one.number for one in stored(spec) if one.state is TrialState.PENDING}
    assert pending == {*failed, *copies} - {*memory}
    run(spec, trials=9)
    after = stored(spec)
    for number in copies:
        leader = after[number].duplicate_of
        assert leader is not None and after[number].metrics == after[leader].metrics
        assert after[number].state is TrialState.DUPLICATE
    assert [one.number for one in after if one.failure is not None] == memory
    check_books(spec)


def test_nothing_is_retried_while_the_study_is_held(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"diverge": [0]})
    refused: list[str] = []

    def try_it() -> None:
        with pytest.raises(StudyRefusedError) as caught:
            retry(spec)
        refused.append(str(caught.value))

    run(spec, trials=3, watcher=Script((lambda seen: seen.failed == 1, try_it)))
    assert "archsearch stop stub" in refused[0]


def test_device_time_ends_a_study_and_counts_all_attempts(tmp_path: Path) -> None:
    spec = stub_study(tmp_path, orders={"jitter_s": 0.3, "lose_once": [0]})
    spec = changed(changed(spec, "search", device_time_s=1.0), "resources", cpus=2, parallel=1)
    outcome = run(spec, trials=100)
    assert outcome.stop_reason == "device time"
    assert 0 < outcome.last.evaluated < 100
    attempts = [attempt for one in stored(spec) for attempt in one.attempts]
    with Store(spec.tracking.storage) as store:
        used_s = store.study("stub").device_seconds
    assert used_s == pytest.approx(sum(one.device_seconds for one in attempts))
    assert used_s >= 1.0
    for one in attempts:
        assert one.finished_at is not None
        lasted_s = (one.finished_at - one.started_at).total_seconds()
        assert one.device_seconds < 2 * lasted_s, "two cores, and only once it was up"
    assert run(spec, trials=100).last.evaluated == outcome.last.evaluated


def test_a_study_whose_output_breaks_stops_cleanly(tmp_path: Path) -> None:
    """As in `archsearch run STUDY.yaml | head`."""

    class Closed(Watcher):
        def on_event(self, snapshot: Snapshot) -> None:
            super().on_event(snapshot)
            if snapshot.evaluated:
                raise BrokenPipeError

    spec, watcher = stub_study(tmp_path), Closed()
    outcome = run(spec, trials=100, watcher=watcher)
    assert outcome.stop_reason == "interrupted"
    assert [one.evaluated > 0 for one in watcher.snapshots].count(True) == 1
    run(spec, trials=6)
    check_books(spec)


def test_nobody_is_asked_where_nothing_runs(tmp_path: Path) -> None:
    spec = stub_study(tmp_path)
    run(spec, trials=1)
    assert ask(spec, Request.STOP) == control.Asked(None)
    assert run(spec, trials=2).stop_reason == "trials", "no request is left behind"
