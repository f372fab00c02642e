"""The coordinator's desk: every change of a trial goes through here, to all who must know.

First the ledger, which decides; then the picture in memory; then Optuna's tables, a view. The
sampler is told in order, just before it is asked again.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.peers import rung_recalls
from archsearch.errors import FailureClass, ServiceError
from archsearch.gate import gate
from archsearch.measures import constraints, measured_metrics, measured_violations
from archsearch.messages import Evaluated, Rung
from archsearch.propose.mirror import Mirror
from archsearch.propose.sampler import Proposal, Proposer
from archsearch.propose.told import Told, told_of
from archsearch.records import TrialState
from archsearch.spec import StudySpec
from archsearch.store.ledger import Ledger, NewTrial, Verdict
from archsearch.store.results import KnownEvaluation, KnownProfile, put_evaluation


@dataclass(frozen=True)
class Desk:
    """One study's records, in memory, in the database and in Optuna's view."""

    spec: StudySpec
    ledger: Ledger
    mirror: Mirror
    proposer: Proposer
    book: Book

    def propose(self, proposal: Proposal) -> Entry:
        """Write down a new trial, decided at once if it needs no worker."""
        number = len(self.book)
        seen = gate(proposal.arch, self.spec)
        leader = None if seen.violations else self.book.first_of(proposal.arch)
        entry = Entry(
            number=number,
            arch=proposal.arch,
            params=proposal.params,
            state=TrialState.PENDING,
            metrics=seen.metrics,
            constraints=seen.constraints,
            duplicate_of=leader,
            told=self.book.told,
        )
        self.ledger.add_trial(
            NewTrial(
                number=number,
                arch=entry.arch,
                params=entry.params,
                sampler_notes=proposal.notes,
                metrics=entry.metrics,
                told=entry.told,
                duplicate_of=leader,
            )
        )
        self.book.add(entry)
        self.show(entry)
        if seen.violations:
            self._end(entry, Verdict(TrialState.INFEASIBLE, violations=seen.violations))
        elif leader is not None:
            if self.book[leader].state.is_final:
                self.copy(self.book[leader], entry)
        elif seen.error:
            verdict = Verdict(
                TrialState.FAILED,
                failure=FailureClass.PLUGIN_ERROR,
                message=seen.error,
                traceback=seen.traceback,
            )
            self._end(entry, verdict)
        return entry

    def show(self, entry: Entry) -> None:
        """Show a pending trial as RUNNING in Optuna's tables."""
        notes = {
            "archsearch_trial": entry.number,
            "archsearch_hash": entry.arch.arch_hash,
            "archsearch_architecture": entry.arch.summary,
        }
        self.ledger.check()
        entry.optuna_number = self.mirror.add(entry.params, notes)
        self.ledger.set_optuna_number(entry.number, entry.optuna_number)

    def checkpoints(self) -> str:
        """Where workers that see this folder keep the progress of long trials; made if missing."""
        folder = Path(self.spec.tracking.weights).resolve() / "unfinished"
        with contextlib.suppress(OSError):  # then long trials keep nothing
            folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    def put_evaluation(self, evaluated: Evaluated) -> KnownEvaluation:
        """Store trained weights as a file, then the evaluation that names it."""
        evaluation = evaluated.evaluation
        name = f"{evaluation.arch_hash}-{evaluation.recipe_hash}.safetensors"
        path = write_weights(Path(self.spec.tracking.weights), name, evaluated.weights)
        digest = hashlib.sha256(evaluated.weights).hexdigest()
        with self.ledger.writing() as connection:
            row = put_evaluation(connection, evaluation, str(path), digest)
        return KnownEvaluation(row, evaluation)

    def complete(
        self,
        entry: Entry,
        evaluation: KnownEvaluation,
        profile: KnownProfile,
        token: str | None,
        from_cache: bool,
    ) -> None:
        """End a trial that has both results."""
        results = (evaluation.evaluation, profile.profile)
        metrics = measured_metrics(self.spec, *results)
        entry.constraints = constraints(self.spec, entry.arch, results)
        entry.rung_recalls = rung_recalls(self.spec.train, evaluation.evaluation.rungs)
        entry.learning_rate = evaluation.evaluation.learning_rate
        verdict = Verdict(
            state=TrialState.COMPLETE,
            metrics=metrics,
            violations=measured_violations(self.spec, *results),
            from_cache=from_cache,
            evaluation_id=evaluation.row,
            profile_id=profile.row,
        )
        self._end(entry, verdict, token)

    def confirm(self, entry: Entry, evaluation: KnownEvaluation, token: str | None) -> None:
        """Give a complete trial the recall of fresh seeds."""
        self.ledger.confirm(entry.number, evaluation.row, token)
        entry.confirmed_recall = evaluation.evaluation.recall

    def fail(
        self, entry: Entry, failure: FailureClass, message: str, traceback: str, token: str | None
    ) -> None:
        """End a trial that has no result."""
        verdict = Verdict(TrialState.FAILED, failure=failure, message=message, traceback=traceback)
        self._end(entry, verdict, token)

    def stop(self, entry: Entry, rungs: Sequence[Rung], reason: str, token: str) -> None:
        """End a trial that was stopped early."""
        entry.rung_recalls = rung_recalls(self.spec.train, rungs)
        self._end(entry, Verdict(TrialState.STOPPED, message=reason), token)

    def tell_sampler(self, lookahead: int) -> None:
        """Tell the sampler, in order, of every trial before the window."""
        for entry in self.book.entries[self.book.told : self.book.window_start(lookahead)]:
            self.proposer.tell(entry.number, self._told(entry))
            self.book.told = entry.number + 1

    def put_back(self, reason: str) -> None:
        """End what is pending in Optuna's view; our own trials stay pending for the next run."""
        for entry in self.book.entries:
            if entry.state is TrialState.PENDING and entry.optuna_number is not None:
                self.mirror.tell(entry.optuna_number, Told("fail"), reason)

    def _end(self, entry: Entry, verdict: Verdict, token: str | None = None) -> None:
        if not self.ledger.finish(entry.number, verdict, token):
            return
        entry.state = verdict.state
        entry.metrics = {**entry.metrics, **verdict.metrics}
        entry.violations = verdict.violations
        entry.failure = verdict.failure
        entry.from_cache = verdict.from_cache
        self.tell_mirror(entry, verdict.message or "; ".join(verdict.violations))
        for duplicate in list(self.book.duplicates_of(entry.number)):
            self.copy(entry, duplicate)

    def copy(self, leader: Entry, entry: Entry) -> None:
        """A duplicate ends as its leader did."""
        entry.constraints = leader.constraints
        stopped = ", which was stopped early" if leader.state is TrialState.STOPPED else ""
        verdict = Verdict(
            TrialState.DUPLICATE,
            metrics=leader.metrics,
            violations=leader.violations,
            failure=leader.failure,
            message=f"the same architecture as trial {leader.number}{stopped}",
        )
        self._end(entry, verdict)

    def tell_mirror(self, entry: Entry, reason: str) -> None:
        """Show in Optuna's tables how a trial ended."""
        assert entry.optuna_number is not None
        told = self._told(entry)
        self.mirror.tell(entry.optuna_number, told, reason if told.state != "complete" else "")

    def _told(self, entry: Entry) -> Told:
        first = entry if entry.duplicate_of is None else self.book[entry.duplicate_of]
        failed = entry.failure is not None
        return told_of(self.spec, first.state, failed, entry.metrics, entry.constraints)


def write_weights(folder: Path, name: str, weights: bytes) -> Path:
    """Write a file as a whole or not at all. Raises ServiceError, such as for a full disk."""
    path = folder.resolve() / name
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(weights)
        unfinished.replace(path)
    except OSError as error:
        raise ServiceError(f"trained weights cannot be written to {path}: {error}") from error
    return path
