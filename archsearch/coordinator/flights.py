"""Attempts in flight: what each of them has shown so far, and when its time is up."""

import time
from dataclasses import dataclass, field

from archsearch.coordinator.book import Entry
from archsearch.messages import Rung, Started, TrialRequest
from archsearch.snapshot import RunningTrial
from archsearch.store.results import KnownEvaluation


@dataclass
class Flight:
    """One attempt at a trial, from its submission to its end."""

    entry: Entry
    attempt: int
    """1 for the first try in this run of the coordinator."""
    request: TrialRequest
    evaluation: KnownEvaluation | None
    """Known before, or stored when training ends."""
    submitted: float = field(default_factory=time.monotonic)
    up: float | None = None
    """When a worker took it; its deadline counts from here, waiting for a worker does not."""
    started: Started | None = None
    rungs: list[Rung] = field(default_factory=list)
    heard: float | None = None
    """When its worker last showed a sign of life."""

    def hear(self) -> None:
        """Note a sign of life of its worker."""
        self.heard = time.monotonic()

    def is_silent(self, lease_s: float) -> bool:
        """True if its worker, once up, has shown no sign of life for so long."""
        return self.heard is not None and time.monotonic() - self.heard > lease_s

    @property
    def confirms(self) -> bool:
        """True if it trains a complete trial once more, with fresh seeds."""
        return not self.request.profile_wanted

    @property
    def seconds_up(self) -> float:
        """How long it has been on a worker."""
        return time.monotonic() - self.up if self.up is not None else 0.0

    def is_overdue(self, timeout_s: float) -> bool:
        return self.up is not None and time.monotonic() - self.up > timeout_s

    def show(self) -> RunningTrial:
        """As the observer sees it."""
        worker = f"{self.started.node} pid {self.started.pid}" if self.started is not None else ""
        return RunningTrial(
            number=self.entry.number,
            attempt=self.attempt,
            summary=self.entry.arch.summary,
            worker=worker,
            seconds=time.monotonic() - self.submitted,
            rung=self.rungs[-1].rung if self.rungs else None,
            best_recall=max(self.rungs[-1].selection_recall) if self.rungs else None,
        )
