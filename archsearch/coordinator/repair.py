"""Taking a study up again: what an earlier coordinator left behind is put right before going on.

The ledger decides. Every trial in it is put back before the sampler in order; attempts that nobody
runs any more end as lost; Optuna's view is brought to say the same, so that no trial stays RUNNING.
"""

from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.desk import Desk
from archsearch.coordinator.peers import rung_recalls
from archsearch.gate import gate
from archsearch.measures import constraints
from archsearch.propose.mirror import Mirror
from archsearch.propose.sampler import Proposer
from archsearch.propose.told import Told
from archsearch.records import AttemptState, TrialRecord, TrialState
from archsearch.spec import StudySpec

_LEFT = "its coordinator went away"


def read_book(spec: StudySpec, records: list[TrialRecord], proposer: Proposer) -> Book:
    """Rebuild the picture in memory, and the sampler's study, from stored trials."""
    book = Book()
    for record in records:
        proposer.place(record.params, record.sampler_notes)
        entry = Entry(
            number=record.number,
            arch=record.arch,
            params=record.params,
            state=record.state,
            metrics=record.metrics,
            violations=record.violations,
            duplicate_of=record.duplicate_of,
            failure=record.failure,
            from_cache=record.from_cache,
            optuna_number=record.optuna_number,
            told=record.told,
        )
        if entry.duplicate_of is not None:
            entry.constraints = book[entry.duplicate_of].constraints
        elif record.evaluation is not None and record.profile is not None:
            results = (record.evaluation, record.profile)
            entry.constraints = constraints(spec, record.arch, results)
            entry.rung_recalls = rung_recalls(spec.train, record.evaluation.rungs)
            entry.learning_rate = record.evaluation.learning_rate
        else:
            entry.constraints = gate(record.arch, spec).constraints
            entry.rung_recalls = rung_recalls(spec.train, record.rungs)
        if record.confirmation is not None:
            entry.confirmed_recall = record.confirmation.recall
        book.add(entry)
    return book


def repair(desk: Desk, records: list[TrialRecord]) -> list[str]:
    """Put right what was left behind, and say what it was."""
    said = []
    running = desk.mirror.running()
    for record in records:
        entry = desk.book[record.number]
        if any(attempt.state is AttemptState.RUNNING for attempt in record.attempts):
            desk.ledger.lose_attempts(record.number, _LEFT)
            if entry.state is TrialState.PENDING:
                said.append(f"trial {record.number} was in flight and runs again")
        said += _repair_mirror(desk, entry, running)
        if entry.optuna_number is not None:
            running.discard(entry.optuna_number)
    said += _end_unknown(desk.mirror, running)
    for entry in desk.book.entries:
        _repair_duplicate(desk, entry)
    return said


def _repair_mirror(desk: Desk, entry: Entry, running: set[int]) -> list[str]:
    """Make Optuna's view of one trial say what the ledger says."""
    shown = entry.optuna_number
    if entry.state is TrialState.PENDING:
        if shown is not None and shown in running:
            desk.mirror.tell(shown, Told("fail"), _LEFT)
        desk.show(entry)
        if shown is not None:
            running.discard(shown)
        return []
    if shown is None:
        desk.show(entry)
    elif shown not in running:
        return []
    desk.tell_mirror(entry, "")
    return [f"trial {entry.number} had ended; Optuna's tables say so now"]


def _end_unknown(mirror: Mirror, running: set[int]) -> list[str]:
    for number in sorted(running):
        mirror.tell(number, Told("fail"), _LEFT)
    return [f"Optuna's trial {number} was left running and has ended" for number in sorted(running)]


def _repair_duplicate(desk: Desk, entry: Entry) -> None:
    """End a duplicate whose leader ended just before its coordinator went away."""
    if entry.duplicate_of is None or entry.state is not TrialState.PENDING:
        return
    if desk.book[entry.duplicate_of].state.is_final:
        desk.copy(desk.book[entry.duplicate_of], entry)
