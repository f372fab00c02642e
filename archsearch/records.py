"""What the database remembers of a study, as plain values for everyone who reads it.

The store returns these; the front, the report, MLflow and the command line are made from them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from archsearch.arch import ArchSpec
from archsearch.errors import FailureClass
from archsearch.messages import Evaluation, PluginFile, Profile, Rung
from archsearch.space import Value
from archsearch.spec import StudySpec

STARTS = "starts"
"""Key, beside the sampler's own, of what a study borrowed from others when it began."""


class TrialState(StrEnum):
    """Where a trial stands. Everything but PENDING is final."""

    PENDING = "pending"
    """Proposed; waiting for a worker, running, or to be run again after a loss."""
    COMPLETE = "complete"
    """Evaluated and profiled."""
    DUPLICATE = "duplicate"
    """An architecture that this study already has; answered from the earlier trial."""
    INFEASIBLE = "infeasible"
    """Excluded before training by a limit or a mixer's own rule."""
    FAILED = "failed"
    """Ended without a result; `failure` says why."""
    STOPPED = "stopped"
    """Stopped early, before the end of its training; `message` says why, `rungs` what it was."""

    @property
    def is_final(self) -> bool:
        return self is not TrialState.PENDING


class AttemptState(StrEnum):
    """Where one try at a trial stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Request(StrEnum):
    """What somebody asks of the coordinator that holds a study."""

    PAUSE = "pause"
    """Start nothing more, let running trials finish, then wait."""
    STOP = "stop"
    """Stop as after Ctrl-C."""


@dataclass(frozen=True)
class AttemptRecord:
    """One try at a trial, on one worker.

    Until `lease_until` its worker is believed to live, unless it shows a sign of life before then.
    `device_seconds` is how long it was on a worker, times the GPUs (or CPU cores) of a trial.
    """

    attempt: int
    token: str
    state: AttemptState
    node: str | None
    pid: int | None
    started_at: datetime
    finished_at: datetime | None
    failure: FailureClass | None
    message: str
    traceback: str = ""
    device_model: str | None = None
    lease_until: datetime | None = None
    device_seconds: float = 0.0


@dataclass(frozen=True)
class TrialRecord:
    """One trial. `number` counts from 0 in the order of proposal.

    `metrics` holds every metric at the context and batch of the study's objectives; analytic ones
    are present from the start, measured ones once COMPLETE (or DUPLICATE of a complete one).
    `violations` are sentences, empty if feasible.
    """

    study: str
    number: int
    state: TrialState
    arch: ArchSpec
    params: dict[str, bool | int | float | str]
    metrics: dict[str, float]
    violations: tuple[str, ...]
    duplicate_of: int | None
    failure: FailureClass | None
    message: str
    traceback: str
    proposed_at: datetime
    finished_at: datetime | None
    from_cache: bool
    attempts: tuple[AttemptRecord, ...] = ()
    rungs: tuple[Rung, ...] = ()
    evaluation: Evaluation | None = None
    confirmation: Evaluation | None = None
    """By seeds that took no part in the search; of members of the front, if the study asks."""
    profile: Profile | None = None
    weights_path: str | None = None
    weights_sha256: str | None = None
    optuna_number: int | None = None
    """Number of the trial that shows this one in Optuna's own tables."""
    sampler_notes: dict[str, dict[str, object]] = field(default_factory=dict)
    """What the sampler noted with the proposal; needed to go on as if never interrupted."""
    told: int = 0
    """Trials that the sampler knew the end of when it proposed this one: its peers."""

    @property
    def believed(self) -> dict[str, float]:
        """Its metrics, with the recall of fresh seeds if there are any."""
        if self.confirmation is None:
            return self.metrics
        return self.metrics | {"recall": self.confirmation.recall}

    @property
    def feasible(self) -> bool:
        return self.state is TrialState.COMPLETE and not self.violations


def losses(trials: Iterable[TrialRecord]) -> dict[str, list[tuple[TrialRecord, str]]]:
    """Trials without a place in the ranking and why, by reason, the most frequent first.

    A duplicate is left to the trial that it repeats.
    """
    found: dict[str, list[tuple[TrialRecord, str]]] = defaultdict(list)
    for trial in trials:
        if trial.duplicate_of is not None:
            continue
        if trial.failure is not None:
            found[str(trial.failure).replace("_", " ")].append((trial, trial.message))
        elif trial.state is TrialState.STOPPED:
            found["stopped early"].append((trial, trial.message))
        elif trial.violations:
            found["over a limit"].append((trial, " ".join(trial.violations)))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def training_saved(spec: StudySpec, trials: Iterable[TrialRecord]) -> float:
    """Share of the training, 0 to 1, that early stopping saved in the trials that trained here."""
    saved: list[float] = []
    for trial in trials:
        if trial.state is TrialState.STOPPED:
            saved.append(1.0 - (trial.rungs[-1].epoch / spec.train.epochs if trial.rungs else 0.0))
        elif trial.state is TrialState.COMPLETE and not trial.from_cache:
            saved.append(0.0)
    return sum(saved) / len(saved) if saved else 0.0


@dataclass(frozen=True)
class StudyRecord:
    """One study. `reference` is the hypervolume's reference point, by metric."""

    name: str
    spec: StudySpec
    created_at: datetime
    stop_reason: str | None
    coordinator: str | None
    """Who holds the study now, such as `host1 pid 4711`; None if nobody does."""
    seconds_run: float
    reference: dict[str, float] = field(default_factory=dict)
    device_model: str | None = None
    """Device that the first trial ran on; latencies of one study come from one device model."""
    plugins: tuple[PluginFile, ...] = ()
    """One-off mixer files of the study, by content."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """What the sampler setting was resolved to when the study began."""
    request: Request | None = None
    """What its coordinator is asked for."""
    device_seconds: float = 0.0
    """Of all attempts so far."""

    @property
    def starts(self) -> Sequence[Sequence[Mapping[str, Value]]]:
        """Decisions that lead to the trials of other studies that it begins with, by study."""
        starts: Sequence[Sequence[Mapping[str, Value]]] = self.sampler.get(STARTS, ())
        return starts
