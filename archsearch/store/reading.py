"""The store: what is known of every study, read as plain records. The only persistent truth.

Everyone may read: the command line, the report and the MLflow publisher, while a study runs or
later. Writing belongs to the coordinator that holds the study (`ledger`); the one mark that
is made here is the publisher's, on what MLflow already shows. Usable from several threads.
"""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from archsearch.arch import ArchSpec
from archsearch.errors import FailureClass, UsageError, nearest
from archsearch.messages import Evaluation, PluginFile, Profile, Rung
from archsearch.records import (
    AttemptRecord,
    AttemptState,
    Request,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from archsearch.spec import StudySpec
from archsearch.store.database import Database
from archsearch.store.holder import living_holder
from archsearch.store.tables import attempts, evaluations, profiles, rungs, studies, trials

Row = sa.RowMapping
_USED = (
    sa.select(sa.func.coalesce(sa.func.sum(attempts.c.device_seconds), 0.0))
    .select_from(attempts.join(trials))
    .where(trials.c.study_id == studies.c.id)
    .scalar_subquery()
    .label("device_seconds")
)


class Store:
    """One open database of studies. A context manager.

    Args:
        url: SQLAlchemy URL of SQLite (a file) or PostgreSQL.
        create: make the SQLite file and our tables if they do not exist; else it holds no study.

    Raises:
        ServiceError: it cannot be reached, read or upgraded, or a newer archsearch wrote it.
    """

    def __init__(self, url: str, create: bool = False) -> None:
        self.database = Database(url, create)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()

    def studies(self) -> list[str]:
        """Names of all studies, oldest first."""
        if self.database.is_blank:
            return []
        with self.database.reading() as connection:
            return list(connection.scalars(sa.select(studies.c.name).order_by(studies.c.id)))

    def study(self, name: str) -> StudyRecord:
        """One study. Raises UsageError naming those that exist."""
        row = None
        if not self.database.is_blank:
            with self.database.reading() as connection:
                row = _one(connection, sa.select(studies, _USED).where(studies.c.name == name))
        if row is None:
            names = self.studies()
            known = f"its studies: {', '.join(names)}" if names else "it holds no study yet"
            raise UsageError(
                f"no study '{name}' in {self.database.place}{nearest(name, names)}; {known}"
            )
        return _study_record(row)

    def trials(self, study: str) -> list[TrialRecord]:
        """Every trial of a study, in order of number, with its attempts, rungs and results."""
        return self._trials(study, sa.true())

    def trial(self, study: str, number: int) -> TrialRecord:
        """One trial. Raises UsageError saying which numbers exist."""
        found = self._trials(study, trials.c.number == number)
        if not found:
            count = self._count(study)
            known = f"numbers 0 to {count - 1}" if count else "no trial yet"
            raise UsageError(f"study '{study}' has no trial {number}; it has {known}")
        return found[0]

    def unpublished(self, study: str) -> list[TrialRecord]:
        """The outbox: final trials that MLflow does not show yet, in order of number."""
        final = trials.c.state != TrialState.PENDING
        return self._trials(study, sa.and_(final, trials.c.published_at.is_(None)))

    def mark_published(self, study: str, numbers: Iterable[int]) -> None:
        """Take trials out of the outbox. Only the publisher calls this; doing it again is fine."""
        study_id = sa.select(studies.c.id).where(studies.c.name == study).scalar_subquery()
        statement = (
            sa.update(trials)
            .where(trials.c.study_id == study_id, trials.c.number.in_(list(numbers)))
            .values(published_at=datetime.now(UTC))
        )
        with self.database.writing() as connection:
            connection.execute(statement)

    def _count(self, study: str) -> int:
        statement = (
            sa.select(sa.func.count()).select_from(trials.join(studies)).where(_named(study))
        )
        with self.database.reading() as connection:
            return connection.scalars(statement).one()

    def _trials(self, study: str, condition: sa.ColumnElement[bool]) -> list[TrialRecord]:
        if self.database.is_blank:
            self.study(study)  # there is none
        chosen = sa.and_(_named(study), condition)
        again = evaluations.alias("confirmations")
        statement = (
            sa.select(
                trials,
                evaluations.c.evaluation,
                evaluations.c.weights_path,
                evaluations.c.weights_sha256,
                profiles.c.profile,
                again.c.evaluation.label("confirmation"),
            )
            .select_from(
                trials.join(studies)
                .outerjoin(evaluations, trials.c.evaluation_id == evaluations.c.id)
                .outerjoin(again, trials.c.confirmation_id == again.c.id)
                .outerjoin(profiles)
            )
            .where(chosen)
            .order_by(trials.c.number)
        )
        with self.database.reading() as connection:
            rows = connection.execute(statement).mappings().all()
            tried = _attempts(connection, chosen)
            climbed = _rungs(connection, chosen)
        if not rows:
            self.study(study)  # an unknown study is an error, an empty one is not
        return [_trial_record(study, row, tried[row["id"]], climbed[row["id"]]) for row in rows]


def _named(study: str) -> sa.ColumnElement[bool]:
    return studies.c.name == study


def _one(connection: sa.Connection, statement: sa.Select[Any]) -> Row | None:
    return connection.execute(statement).mappings().one_or_none()


def _attempts(
    connection: sa.Connection, chosen: sa.ColumnElement[bool]
) -> dict[int, list[AttemptRecord]]:
    statement = (
        sa.select(attempts)
        .select_from(attempts.join(trials).join(studies))
        .where(chosen)
        .order_by(attempts.c.attempt)
    )
    found: dict[int, list[AttemptRecord]] = defaultdict(list)
    for row in connection.execute(statement).mappings():
        found[row["trial_id"]].append(
            AttemptRecord(
                attempt=row["attempt"],
                token=row["token"],
                state=AttemptState(row["state"]),
                node=row["node"],
                pid=row["pid"],
                started_at=row["started_at"],
                finished_at=row["finished_at"],
                failure=_failure(row),
                message=row["message"],
                traceback=row["traceback"],
                device_model=row["device_model"],
                lease_until=row["lease_until"],
                device_seconds=row["device_seconds"],
            )
        )
    return found


def _rungs(connection: sa.Connection, chosen: sa.ColumnElement[bool]) -> dict[int, list[Rung]]:
    """Rungs of the last attempt of each trial, in order."""
    statement = (
        sa.select(rungs.c.report, attempts.c.trial_id, attempts.c.attempt)
        .select_from(rungs.join(attempts).join(trials).join(studies))
        .where(chosen)
        .order_by(attempts.c.attempt, rungs.c.rung)
    )
    by_attempt: dict[int, dict[int, list[Rung]]] = defaultdict(lambda: defaultdict(list))
    for report, trial_id, attempt in connection.execute(statement):
        by_attempt[trial_id][attempt].append(Rung.model_validate(report))
    last = {trial_id: found[max(found)] for trial_id, found in by_attempt.items()}
    return defaultdict(list, last)


def _failure(row: Row) -> FailureClass | None:
    return FailureClass(row["failure"]) if row["failure"] is not None else None


def _trial_record(
    study: str, row: Row, tried: list[AttemptRecord], climbed: list[Rung]
) -> TrialRecord:
    known, again = (
        Evaluation.model_validate(row[name]) if row[name] is not None else None
        for name in ("evaluation", "confirmation")
    )
    profile = row["profile"]
    return TrialRecord(
        study=study,
        number=row["number"],
        state=TrialState(row["state"]),
        arch=ArchSpec.from_stored(row["arch"]),
        params=row["params"],
        metrics=row["metrics"],
        violations=tuple(row["violations"]),
        duplicate_of=row["duplicate_of"],
        failure=_failure(row),
        message=row["message"],
        traceback=row["traceback"],
        proposed_at=row["proposed_at"],
        finished_at=row["finished_at"],
        from_cache=row["from_cache"],
        attempts=tuple(tried),
        rungs=tuple(climbed) or (known.rungs if known is not None else ()),
        evaluation=known,
        confirmation=again,
        profile=Profile.model_validate(profile) if profile is not None else None,
        weights_path=row["weights_path"],
        weights_sha256=row["weights_sha256"],
        optuna_number=row["optuna_number"],
        sampler_notes=row["sampler_notes"],
        told=row["told"],
    )


def _study_record(row: Row) -> StudyRecord:
    holder = living_holder(row)
    return StudyRecord(
        name=row["name"],
        spec=StudySpec.model_validate(row["spec"]),
        created_at=row["created_at"],
        stop_reason=row["stop_reason"],
        coordinator=str(holder) if holder is not None else None,
        seconds_run=row["seconds_run"],
        reference=row["reference"],
        device_model=row["device_model"],
        plugins=tuple(PluginFile.model_validate(plugin) for plugin in row["plugins"]),
        sampler=row["sampler"],
        request=Request(row["request"]) if row["request"] is not None else None,
        device_seconds=row["device_seconds"],
    )
