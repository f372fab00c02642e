"""Attempts whose worker falls silent, on a cluster that is only played: no Ray, no workers."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import sqlalchemy as sa
from samples import checked
from service_cases import Watcher, check_books
from stub_trials import pretended_recall, run_stub, stub_study

from archsearch.cluster import Alive, Answer, Arrival, Gone, Up
from archsearch.coordinator import loop, run, run_study
from archsearch.errors import FailureClass
from archsearch.messages import Event, TrialRequest
from archsearch.records import AttemptState, TrialState
from archsearch.snapshot import StudyOutcome
from archsearch.spec import StudySpec
from archsearch.store import Store
from archsearch.store.tables import attempts


class PlayedCluster:
    """Takes one trial at a time and answers for it, as its subclasses have it."""

    slots = 1
    is_exclusive = True

    def __init__(self, *_: object) -> None:
        self.cancelled: list[str] = []
        self.coming: list[Arrival] = []
        self.tried = 0

    def submit(self, request: TrialRequest) -> None:
        self.tried += 1
        self.coming += self.play(request)

    def play(self, request: TrialRequest) -> Iterator[Arrival]:
        yield from told(request.token, run_stub(request))

    def wait(self, _timeout_s: float) -> list[Arrival]:
        arrived, self.coming = self.coming, []
        return arrived

    def cancel(self, token: str, lost: str = "") -> None:
        self.cancelled.append(token)

    def refuse(self, token: str, why: str) -> None:
        raise AssertionError(why)

    def close(self) -> None:
        pass


def told(token: str, events: Iterator[Event]) -> Iterator[Arrival]:
    yield Up(token)
    yield from (Answer(token, event) for event in events)


class FirstFallsSilent(PlayedCluster):
    """The first attempt is up and says no more, until its trial has been given to another."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.silent: TrialRequest | None = None

    def play(self, request: TrialRequest) -> Iterator[Arrival]:
        if self.tried == 1:
            self.silent = request
            yield Up(request.token)
            return
        if self.tried == 2:
            assert self.silent is not None and self.silent.number == request.number
            assert self.cancelled == [self.silent.token]
            yield from told(self.silent.token, run_stub(self.silent))
            yield Gone(self.silent.token, FailureClass.LOST, "cancelled")
        yield from super().play(request)


class Beating(PlayedCluster):
    """Trials that are long in coming and alive."""

    def play(self, request: TrialRequest) -> Iterator[Arrival]:
        yield Up(request.token)
        self.left = 50
        self.request = request

    def wait(self, _timeout_s: float) -> list[Arrival]:
        if self.coming:
            return super().wait(0)
        self.left -= 1
        if self.left:
            return [Alive(self.request.token)]
        return list(told(self.request.token, run_stub(self.request)))[1:]


class Checking(PlayedCluster):
    """Every trial checks two kernels, of which one is right; keeps what trials are told."""

    heard: ClassVar[list[tuple[str, ...]]] = []

    def play(self, request: TrialRequest) -> Iterator[Arrival]:
        self.heard.append(request.kernels_passed)
        yield Up(request.token)
        yield from (Answer(request.token, checked(ok)) for ok in (True, False))
        yield from list(told(request.token, run_stub(request)))[1:]


def play(
    spec: StudySpec, cluster: type[PlayedCluster], monkeypatch: pytest.MonkeyPatch
) -> StudyOutcome:
    monkeypatch.setattr(run, "Cluster", cluster)
    return run_study(spec, (), Watcher())


def test_a_late_answer_after_the_lease_is_kept_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEASE_S", 0.05)
    spec = stub_study(tmp_path)
    assert play(spec, FirstFallsSilent, monkeypatch).last.complete == 6
    with Store(spec.tracking.storage) as store:
        trial = store.trial("stub", 0)
        with store.database.reading() as connection:
            late = dict(
                connection.execute(sa.select(attempts.c.token, attempts.c.late_answer)).all()
            )
    first, second = trial.attempts
    assert (first.state, first.failure) == (AttemptState.FAILED, FailureClass.LOST)
    assert first.message == "its worker showed no sign of life for 0.05 s"
    assert (second.state, trial.state) == (AttemptState.DONE, TrialState.COMPLETE)
    assert late[first.token]["kind"] == "profiled" and late[second.token] is None
    assert trial.metrics["recall"] == pretended_recall(trial.arch.arch_hash)
    check_books(spec)


def test_a_worker_that_shows_signs_of_life_keeps_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RENEW_S", 0.0)
    spec = stub_study(tmp_path)
    assert play(spec, Beating, monkeypatch).last.complete == 6
    with Store(spec.tracking.storage) as store:
        trials = store.trials("stub")
    tried = [attempt for trial in trials for attempt in trial.attempts]
    assert [attempt.state for attempt in tried] == [AttemptState.DONE] * 6
    for attempt in tried:
        assert attempt.lease_until is not None and attempt.device_seconds > 0
        assert attempt.device_model == "pretended device"


def test_kernels_are_checked_until_they_have_passed_whatever_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checking, "heard", [])
    assert play(stub_study(tmp_path), Checking, monkeypatch).last.complete == 6
    first, *others = Checking.heard
    assert first == () and set(others) == {("right",)}
    later = stub_study(tmp_path, "later", {"another": "recipe"})
    assert play(later, Checking, monkeypatch).last.complete == 6
    assert Checking.heard[6:] and set(Checking.heard[6:]) == {("right",)}
