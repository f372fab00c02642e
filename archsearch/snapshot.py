"""What a running study shows of itself: a snapshot after every change, and how it ended.

The coordinator makes these and hands them to an `Observer`; the command line prints them, tests
collect them. Plain values: knows nothing of terminals, Ray or the database.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class RunningTrial:
    """One trial in flight. `worker` is such as `host1 pid 4711`, empty while it waits for one."""

    number: int
    attempt: int
    summary: str
    """The architecture in one line."""
    worker: str
    seconds: float
    """Since the attempt was submitted."""
    rung: int | None
    """Last evaluation on the selection split; None before the first."""
    best_recall: float | None
    """Best member's recall on the selection split at that rung, 0 to 1."""


@dataclass(frozen=True)
class Best:
    """The best feasible value of one objective so far, and whose it is."""

    metric: str
    value: float
    number: int
    summary: str


@dataclass(frozen=True)
class Snapshot:
    """A study at one moment. Counts are over all runs of the study."""

    study: str
    trials: int
    """Budget of distinct evaluated architectures."""
    evaluated: int
    """Complete, stopped early and failed; what the budget counts."""
    complete: int
    from_cache: int
    """Of the complete ones, answered from earlier results without training."""
    failed: int
    duplicate: int
    infeasible: int
    waiting: int
    """Proposed, not yet on a worker."""
    running: tuple[RunningTrial, ...]
    front_size: int
    hypervolume: float
    """0 to 1; see `front`."""
    best: tuple[Best, ...]
    """One for each objective that has a value, in their order."""
    seconds: float
    """Wall clock of this run."""
    seconds_left: float | None
    """Estimate, None before there is anything to estimate it from."""
    slots: int
    """Trials that can run at once."""
    note: str = ""
    """A sentence about what just happened, such as a trial that was lost and goes again."""
    stopped: int = 0
    """Trials that were stopped early."""


INTERRUPTED = ("interrupted", "stopped")
"""Reasons that are somebody's wish: here (Ctrl-C and the like), or by `archsearch stop`."""


@dataclass(frozen=True)
class StudyOutcome:
    """How a run of a study ended. `last` is its last snapshot."""

    study: str
    stop_reason: str
    """`trials`, `time`, `device time`, `failures`, `space exhausted`, or one of `INTERRUPTED`."""
    message: str
    """One sentence for people: why it ended and how to go on."""
    last: Snapshot
    repaired: tuple[str, ...] = field(default=())
    """What an earlier run had left behind and was put right at the start."""

    @property
    def interrupted(self) -> bool:
        return self.stop_reason in INTERRUPTED


class Observer(Protocol):
    """Watches a study. Called from the coordinator's thread: it must return quickly."""

    def on_event(self, snapshot: Snapshot) -> None:
        """Called after every change, and at least once a second."""


class Publisher(Protocol):
    """Shows finished trials elsewhere. Reads the store; the coordinator never waits for it."""

    def start(self) -> None:
        """Called once the study is stored, before its first trial."""

    def notify(self) -> None:
        """Something changed; returns at once."""

    def stop(self, timeout_s: float) -> None:
        """Called at the end: publish what is left, for at most `timeout_s` seconds."""
