"""The coordinator's picture of its study: every trial in order, and when the next may be proposed.

A proposal must not depend on which trial happened to finish first, or the same seed would not
search the same way twice. So trial n is proposed when the sampler has been told of exactly the
trials before a window: the last `lookahead - 1` trials that need a worker, and what lies between
them, are not told yet even if they are done. What it costs: a slow trial holds back proposals that
lie further ahead of it than the window. Results are written down as they come, in any order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from archsearch.arch import ArchSpec
from archsearch.errors import FailureClass
from archsearch.records import TrialState
from archsearch.space import Value


@dataclass
class Entry:
    """One trial, as far as the coordinator needs it."""

    number: int
    arch: ArchSpec
    params: dict[str, Value]
    state: TrialState
    metrics: dict[str, float]
    constraints: dict[str, float] = field(default_factory=dict)
    violations: tuple[str, ...] = ()
    duplicate_of: int | None = None
    failure: FailureClass | None = None
    from_cache: bool = False
    optuna_number: int | None = None
    told: int = 0
    """Trials that the sampler had been told of when this one was proposed."""
    rung_recalls: tuple[float, ...] = ()
    """Recall at every rung it reached, for early stopping; of a trial that has ended."""

    learning_rate: float | None = None
    """Chosen for it, once it is complete."""
    confirmed_recall: float | None = None
    """Mean over fresh seeds, if it was trained with them."""

    @property
    def believed(self) -> dict[str, float]:
        """Its metrics, with the recall of fresh seeds if there are any."""
        if self.confirmed_recall is None:
            return self.metrics
        return self.metrics | {"recall": self.confirmed_recall}

    @property
    def is_work(self) -> bool:
        """True if it needs, or needed, a worker: neither infeasible nor a duplicate."""
        return self.state is not TrialState.INFEASIBLE and self.duplicate_of is None

    @property
    def feasible(self) -> bool:
        return self.state is TrialState.COMPLETE and not self.violations


class Book:
    """All trials of a study, in order of number."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = []
        self.told = 0
        """How many trials, from the first on, the sampler has been told of."""
        self._first: dict[str, int] = {}
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number]

    def add(self, entry: Entry) -> None:
        """Append the next trial."""
        assert entry.number == len(self.entries)
        self.entries.append(entry)
        self._first.setdefault(entry.arch.arch_hash, entry.number)

    def first_of(self, arch: ArchSpec) -> int | None:
        """Number of the first trial of an architecture; None if it is new."""
        return self._first.get(arch.arch_hash)

    def is_known(self, arch: ArchSpec) -> bool:
        return arch.arch_hash in self._first

    def duplicates_of(self, number: int) -> Iterator[Entry]:
        """Trials that wait for the result of another."""
        for entry in self.entries:
            if entry.duplicate_of == number and entry.state is TrialState.PENDING:
                yield entry

    def count(self, state: TrialState) -> int:
        return sum(entry.state is state for entry in self.entries)

    @property
    def work(self) -> int:
        """Distinct architectures that were or will be evaluated; what the budget counts."""
        return sum(entry.is_work for entry in self.entries)

    @property
    def evaluated(self) -> int:
        """Of those, how many have ended."""
        return sum(entry.is_work and entry.state.is_final for entry in self.entries)

    @property
    def free_in_a_row(self) -> int:
        """How many of the latest trials in a row needed no worker."""
        run = 0
        for entry in reversed(self.entries):
            if entry.is_work:
                break
            run += 1
        return run

    def window_start(self, lookahead: int) -> int:
        """Trials before this one are told before the next is proposed; the others are not."""
        work = [entry.number for entry in self.entries if entry.is_work]
        kept = lookahead - 1
        if kept == 0 or not work:
            return len(self.entries)
        return work[-kept] if len(work) > kept else work[0]

    def may_propose(self, lookahead: int) -> bool:
        """True if every trial before the window has ended."""
        start = self.window_start(lookahead)
        return all(entry.state.is_final for entry in self.entries[self.told : start])
