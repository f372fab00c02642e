"""Studies over a table of trained architectures: what was found after how much training.

The proposals, the window of trials that are not told yet, the answers to duplicates, the
hypervolume and the rule of early stopping are the product's own; only training is looked up.
`WORKERS` trials run at once and take the seconds that they took. `Plain` is Optuna as a user would
call it: told at once, and duplicates are trained again. Knows no statistics and no file of results.
"""

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from search_table import Row

from archsearch.arch import ArchSpec
from archsearch.compose import compose, walk
from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.loop import WINDOW
from archsearch.coordinator.nexts import Nexts
from archsearch.coordinator.peers import peers_of
from archsearch.front import hypervolume_from, reference_point
from archsearch.propose.corners import largest
from archsearch.propose.sampler import Proposal, Proposer, distribution_of, resolve_sampler
from archsearch.propose.told import Told, told_of
from archsearch.records import TrialState
from archsearch.space import Value
from archsearch.spec import StudySpec
from archsearch.stopping import decide, point_of, quality

WORKERS = 4
_KEPT = {"mixer_rules": 0.0}


@dataclass
class Run:
    """One simulated study: after each training that ended, what was spent and what was found."""

    seconds: list[float] = field(default_factory=list)
    """Of training, in all."""
    share: list[float] = field(default_factory=list)
    """Of the true front's hypervolume."""
    ask_s: float = 0.0
    """Processor time of all proposals."""

    def at(self, trainings: int) -> float:
        """Share after so many trainings, or at the end if that is before."""
        return self.share[min(trainings, len(self.share)) - 1]

    def spent_at(self, trainings: int) -> float:
        """Seconds that so many trainings took."""
        return self.seconds[min(trainings, len(self.seconds)) - 1]

    def until(self, share: float) -> tuple[int, float] | None:
        """Trainings and seconds that it took to reach a share; None if it never did."""
        for number, (seconds, reached) in enumerate(zip(self.seconds, self.share, strict=True)):
            if reached >= share:
                return number + 1, seconds
        return None


class Field:
    """The part of a table that a study's space covers, and the hypervolume of what is found."""

    def __init__(self, spec: StudySpec, rows: Mapping[str, Row]) -> None:
        self.spec = spec
        hashes = [one.arch.arch_hash for one in walk(spec.model)]
        self.rows = {arch_hash: rows[arch_hash] for arch_hash in hashes}
        most = largest(spec)
        self.reference = reference_point(spec, most, most)
        self.best = self.hypervolume([metrics_of(row) for row in self.rows.values()])

    def hypervolume(self, found: Sequence[Mapping[str, float]]) -> float:
        return hypervolume_from(self.spec, self.reference, found)

    def note(self, run: Run, row: Row, seconds: float, found: list[dict[str, float]]) -> None:
        """A training has ended; `found` is what has reached the end so far."""
        run.seconds.append((run.seconds[-1] if run.seconds else 0.0) + seconds)
        run.share.append(self.hypervolume(found) / self.best)


def metrics_of(row: Row) -> dict[str, float]:
    assert row.recall is not None, row.summary
    return {**row.metrics, "recall": row.recall}


class Study:
    """One study of the product over the table."""

    def __init__(self, field_: Field) -> None:
        self.field = field_
        self.spec = field_.spec
        self.proposer = Proposer(self.spec, resolve_sampler(self.spec))
        self.book = Book()
        self.nexts = Nexts(self.spec, self.proposer, self.book)
        self.running: list[tuple[float, int]] = []
        self.waiting: list[Entry] = []
        self.now = 0.0
        self.result = Run()

    def run(self) -> Run:
        found: list[dict[str, float]] = []
        is_open = True
        while is_open or self.running:
            is_open = is_open and self._fill()
            self._start()
            if not self.running:
                break
            self.now, number = heapq.heappop(self.running)
            entry = self.book[number]
            seconds = self._end(entry)
            if entry.feasible:
                found.append(entry.metrics)
            self.field.note(self.result, self._row(entry), seconds, found)
        return self.result

    def _fill(self) -> bool:
        """Propose and start what there is room for; False if there is nothing left to propose."""
        lookahead = WINDOW * WORKERS
        budget = self.spec.search.trials
        while self.book.work < budget and self.book.may_propose(lookahead):
            before = time.process_time()
            for entry in self.book.entries[self.book.told : self.book.window_start(lookahead)]:
                self.proposer.tell(entry.number, self._told(entry))
                self.book.told = entry.number + 1
            proposal = self.nexts.next()
            self.result.ask_s += time.process_time() - before
            if proposal is None:
                return False
            self._add(proposal)
            self._start()
        return self.book.work < budget

    def _add(self, proposal: Proposal) -> None:
        row = self.field.rows[proposal.arch.arch_hash]
        leader = self.book.first_of(proposal.arch)
        entry = Entry(
            number=len(self.book),
            arch=proposal.arch,
            params=proposal.params,
            state=TrialState.PENDING,
            metrics=dict(row.metrics),
            duplicate_of=leader,
            told=self.book.told,
        )
        self.book.add(entry)
        if leader is None:
            self.waiting.append(entry)
        elif self.book[leader].state.is_final:
            self._copy(self.book[leader], entry)

    def _copy(self, leader: Entry, entry: Entry) -> None:
        entry.metrics, entry.state = leader.metrics, TrialState.DUPLICATE

    def _start(self) -> None:
        while self.waiting and len(self.running) < WORKERS:
            entry = self.waiting.pop(0)
            row = self._row(entry)
            last = self._last_rung(entry, row)
            rates, rungs = row.learning_rates, row.rungs[: last + 1]
            entry.rung_recalls = tuple(quality(rates, recalls) for recalls in rungs)
            heapq.heappush(self.running, (self.now + row.rung_seconds[last], entry.number))

    def _row(self, entry: Entry) -> Row:
        return self.field.rows[entry.arch.arch_hash]

    def _last_rung(self, entry: Entry, row: Row) -> int:
        """The rung after which a trial is stopped; the last if it is not."""
        peers, count = peers_of(self.spec, self.book, entry), len(row.rungs)
        if peers is None:
            return count - 1
        for rung, points in peers.points.items():
            recall = quality(row.learning_rates, row.rungs[rung])
            own = point_of(self.spec.objectives, recall, row.metrics)
            if not decide(peers.rule, rung, count, own, points).goes_on:
                return rung
        return count - 1

    def _told(self, entry: Entry) -> Told:
        first = entry if entry.duplicate_of is None else self.book[entry.duplicate_of]
        return told_of(self.spec, first.state, False, entry.metrics, _KEPT)

    def _end(self, entry: Entry) -> float:
        """End a trial and what waits for it; seconds of training that it took."""
        row = self._row(entry)
        entry.state = TrialState.STOPPED
        if len(entry.rung_recalls) == len(row.rungs):
            entry.metrics, entry.state = metrics_of(row), TrialState.COMPLETE
        for duplicate in list(self.book.duplicates_of(entry.number)):
            self._copy(entry, duplicate)
        return row.rung_seconds[len(entry.rung_recalls) - 1]


class Plain:
    """Optuna without the product, on the same decisions.

    Args:
        sampler: Optuna's; None: what it takes by itself for several objectives, NSGA-II.
    """

    def __init__(self, field_: Field, sampler: optuna.samplers.BaseSampler) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.field = field_
        self.spec = field_.spec
        directions = [one.direction for one in self.spec.objectives]
        self.study = optuna.create_study(sampler=sampler, directions=directions)

    def run(self) -> Run:
        result, found = Run(), list[dict[str, float]]()
        running: list[tuple[float, int, optuna.Trial, Row]] = []
        now, asked = 0.0, 0
        while True:
            while len(running) < WORKERS and asked < self.spec.search.trials:
                before = time.process_time()
                trial = self.study.ask()
                row = self.field.rows[self._suggested(trial).arch_hash]
                result.ask_s += time.process_time() - before
                asked += 1
                heapq.heappush(running, (now + row.rung_seconds[-1], asked, trial, row))
            if not running:
                return result
            now, _number, trial, row = heapq.heappop(running)
            metrics = metrics_of(row)
            self.study.tell(trial, [metrics[one.metric] for one in self.spec.objectives])
            found.append(metrics)
            self.field.note(result, row, row.rung_seconds[-1], found)

    def _suggested(self, trial: optuna.Trial) -> ArchSpec:
        def choose(name: str, candidates: tuple[Value, ...]) -> Value:
            kind = distribution_of(candidates)
            if isinstance(kind, optuna.distributions.IntDistribution):
                return trial.suggest_int(name, kind.low, kind.high, step=kind.step)
            value = trial.suggest_categorical(name, candidates)
            assert value is not None
            return value

        return compose(self.spec.model, choose)
