"""Snapshots of a running study for its observer, made from the coordinator's picture in memory."""

import time

from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.heartbeat import Heartbeat
from archsearch.coordinator.loop import Loop
from archsearch.front import costs, hypervolume_from
from archsearch.pareto import ranks
from archsearch.records import TrialState
from archsearch.snapshot import Best, Observer, RunningTrial, Snapshot
from archsearch.spec import StudySpec

QUIET_S = 0.4
"""With the loop's wait of half a second: a snapshot at least once a second."""


class Showing:
    """Hands snapshots to an observer; front and hypervolume are computed only when they change."""

    def __init__(
        self, spec: StudySpec, book: Book, heartbeat: Heartbeat, observer: Observer
    ) -> None:
        self.reference: dict[str, float] = {}
        self._spec = spec
        self._book = book
        self._heartbeat = heartbeat
        self._observer = observer
        self._evaluated_before = book.evaluated
        self._shown = 0.0
        self._pace_from: float | None = None
        self._front: tuple[int, int, float] = (-1, 0, 0.0)

    def show(self, loop: Loop | None, note: str = "") -> Snapshot:
        """Make a snapshot and hand it to the observer."""
        flights = loop.flights.values() if loop is not None else ()
        running = tuple(flight.show() for flight in flights if flight.up is not None)
        self._shown = time.monotonic()
        if running and self._pace_from is None:
            self._pace_from = self._heartbeat.seconds
        snapshot = self._snapshot(running, loop.cluster.slots if loop is not None else 0, note)
        self._observer.on_event(snapshot)
        return snapshot

    def tick(self, loop: Loop) -> None:
        """Show the study again if nothing was shown for a while."""
        if time.monotonic() - self._shown > QUIET_S:
            self.show(loop)

    def _snapshot(self, running: tuple[RunningTrial, ...], slots: int, note: str) -> Snapshot:
        book = self._book
        complete = [entry for entry in book.entries if entry.state is TrialState.COMPLETE]
        front_size, hypervolume = self._front_of(complete)
        pending_work = sum(
            entry.is_work and entry.state is TrialState.PENDING for entry in book.entries
        )
        return Snapshot(
            study=self._spec.study,
            trials=self._heartbeat.wishes.search.trials,
            evaluated=book.evaluated,
            complete=len(complete),
            from_cache=sum(entry.from_cache for entry in complete),
            failed=book.count(TrialState.FAILED),
            duplicate=sum(entry.duplicate_of is not None for entry in book.entries),
            infeasible=book.count(TrialState.INFEASIBLE),
            waiting=max(0, pending_work - len(running)),
            running=running,
            front_size=front_size,
            hypervolume=hypervolume,
            best=self._best(complete),
            seconds=self._heartbeat.seconds,
            seconds_left=self._seconds_left(),
            slots=slots,
            note=note,
            stopped=book.count(TrialState.STOPPED),
        )

    def _front_of(self, complete: list[Entry]) -> tuple[int, float]:
        if self._front[0] != len(complete):
            metrics = [entry.metrics for entry in complete if entry.feasible]
            size = ranks([costs(self._spec, row) for row in metrics]).count(0)
            volume = hypervolume_from(self._spec, self.reference, metrics)
            self._front = (len(complete), size, volume)
        return self._front[1:]

    def _best(self, complete: list[Entry]) -> tuple[Best, ...]:
        feasible = [entry for entry in complete if entry.feasible]
        found = []
        for index, objective in enumerate(self._spec.objectives if feasible else ()):
            best = min(feasible, key=lambda one: costs(self._spec, one.metrics)[index])
            value = best.metrics[objective.metric]
            found.append(Best(objective.metric, value, best.number, best.arch.summary))
        return tuple(found)

    def _seconds_left(self) -> float | None:
        """From the pace of this run since its first trial began, and what is left of its time."""
        search = self._heartbeat.wishes.search
        done = self._book.evaluated - self._evaluated_before
        left = search.trials - self._book.evaluated
        guesses = []
        if done > 0:
            taken = self._heartbeat.seconds - (self._pace_from or 0.0)
            guesses.append(max(0.0, left * taken / done))
        if search.time_s is not None:
            guesses.append(max(0.0, search.time_s - self._heartbeat.seconds_run))
        return min(guesses, default=None)
