"""What may be asked of a study from outside: to pause, stop or go on, another budget, a retry.

Each is one transaction that locks the study's row, as a claim does, so that nothing happens between
the look whether a coordinator holds the study and the write. A coordinator reads requests and
budgets every second (`Ledger.wishes`). A budget given here counts until a study file is run again:
then the file's counts.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from archsearch.errors import FailureClass, ServiceError, StudyRefusedError, UsageError
from archsearch.records import Request, TrialState
from archsearch.spec import StudySpec
from archsearch.store.holder import Holder, living_holder
from archsearch.store.reading import Store
from archsearch.store.tables import studies, trials

ANSWER_S = 60.0
"""How long a coordinator may take to stop: it ends trials, and MLflow gets a few seconds."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Asked:
    """Who was asked, and what had been asked before; nobody, and nothing written, if none holds."""

    holder: Holder | None
    before: Request | None = None


@contextmanager
def _locked(store: Store, study: str) -> Iterator[tuple[sa.Connection, sa.RowMapping]]:
    store.study(study)  # an unknown study is the user's error
    found = sa.select(studies).where(studies.c.name == study).with_for_update()
    with store.database.writing() as connection:
        yield connection, connection.execute(found).mappings().one()


def ask(store: Store, study: str, request: Request | None) -> Asked:
    """Ask the coordinator that holds a study for something; None asks it to go on."""
    with _locked(store, study) as (connection, row):
        holder = living_holder(row)
        if holder is None:
            return Asked(None)
        change = sa.update(studies).where(studies.c.id == row["id"]).values(request=request)
        connection.execute(change)
        return Asked(holder, Request(row["request"]) if row["request"] else None)


def wait_until_free(store: Store, study: str, timeout_s: float = ANSWER_S) -> None:
    """Wait until no coordinator holds a study. Raises ServiceError if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while (holder := store.study(study).coordinator) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(
                f"study '{study}' was asked to stop, and {holder} has not done so for "
                f"{timeout_s:g} s; it stops when it looks at the database again"
            )
        time.sleep(_LOOK_S)


def set_budget(
    store: Store, study: str, search: Mapping[str, Any], resources: Mapping[str, Any]
) -> Holder | None:
    """Change fields of the stored budget; return who holds the study and will see it, if any."""
    with _locked(store, study) as (connection, row):
        spec = StudySpec.model_validate(row["spec"])
        parts = {
            "search": spec.search.model_copy(update=dict(search)),
            "resources": spec.resources.model_copy(update=dict(resources)),
        }
        changed = spec.model_copy(update=parts).model_dump(mode="json")
        connection.execute(sa.update(studies).where(studies.c.id == row["id"]).values(spec=changed))
        return living_holder(row)


def retry(
    store: Store, study: str, failure: FailureClass | None, numbers: Sequence[int]
) -> list[int]:
    """Make failed trials pending again, and what repeats them; return the numbers of the former.

    The next run evaluates them before it proposes anything that may build on them. Trials that were
    proposed while they counted as failed stay as they are; for later ones the sampler is told how
    they end now. So proposals are still a function of the study and its results.

    Args:
        failure: only trials that failed so; None: whatever the reason.
        numbers: only these trials; none: all that failed.

    Raises:
        StudyRefusedError: a coordinator holds the study.
        UsageError: one of the numbers is no trial that failed so.
    """
    with _locked(store, study) as (connection, row):
        holder = living_holder(row)
        if holder is not None:
            raise StudyRefusedError(
                f"study '{study}' is held by a coordinator: {holder}; failed trials can be retried "
                f"once it is stopped: archsearch stop {study}"
            )
        mine = trials.c.study_id == row["id"]
        failed = sa.and_(mine, trials.c.state == TrialState.FAILED)
        if failure is not None:
            failed = sa.and_(failed, trials.c.failure == failure)
        chosen = set(connection.scalars(sa.select(trials.c.number).where(failed)))
        if numbers:
            _check_chosen(study, failure, numbers, chosen)
            chosen &= set(numbers)
        repeats = sa.and_(mine, trials.c.duplicate_of.in_(chosen))
        again = {
            "state": TrialState.PENDING,
            "failure": None,
            "message": "",
            "traceback": "",
            "finished_at": None,
            "published_at": None,
        }
        which = sa.or_(sa.and_(mine, trials.c.number.in_(chosen)), repeats)
        connection.execute(sa.update(trials).where(which).values(**again))
    return sorted(chosen)


def _check_chosen(
    study: str, failure: FailureClass | None, numbers: Sequence[int], failed: set[int]
) -> None:
    wrong = sorted(set(numbers) - failed)
    if wrong:
        how = f" ({failure})" if failure is not None else ""
        which = ", ".join(map(str, sorted(failed))) or "none"
        raise UsageError(
            f"of '{study}' these are no failed trials{how}: {', '.join(map(str, wrong))}; "
            f"those that are: {which}"
        )
