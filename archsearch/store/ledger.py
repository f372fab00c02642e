"""The ledger: every write of a study's coordinator, each fenced by the lease it holds.

Every transaction first looks whether the lease is still this coordinator's; if another one has
taken over, nothing is written and `StudyRefusedError` ends the run. An attempt is named by its
token; only the newest attempt of a trial can change the trial.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from archsearch.arch import ArchSpec
from archsearch.errors import FailureClass, StudyRefusedError
from archsearch.messages import Rung, Started
from archsearch.records import AttemptState, Request, TrialState
from archsearch.spec import SearchSpec
from archsearch.store.database import Database
from archsearch.store.holder import LEASE_S, Holder
from archsearch.store.results import plain
from archsearch.store.tables import attempts, rungs, studies, trials


@dataclass(frozen=True)
class NewTrial:
    """A trial as it is proposed."""

    number: int
    arch: ArchSpec
    params: Mapping[str, Any]
    sampler_notes: Mapping[str, Any]
    metrics: Mapping[str, float]
    told: int = 0
    duplicate_of: int | None = None


@dataclass(frozen=True)
class Verdict:
    """How a trial ends."""

    state: TrialState
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to what is known from the architecture alone."""
    violations: tuple[str, ...] = ()
    failure: FailureClass | None = None
    message: str = ""
    traceback: str = ""
    from_cache: bool = False
    evaluation_id: int | None = None
    profile_id: int | None = None


@dataclass(frozen=True)
class Wishes:
    """What people ask of a running study: see `control`."""

    request: Request | None
    search: SearchSpec
    """Its budget as it is now."""


@dataclass(frozen=True)
class Ledger:
    """The writing side of one study, for the coordinator that holds it. Usable from two threads."""

    database: Database
    study: str
    study_id: int
    token: str
    taken_from: Holder | None
    """Coordinator that left without giving the study back."""

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A fenced transaction. Raises StudyRefusedError if the study is no longer ours."""
        lease = sa.select(studies.c.lease_token, studies.c.lease_holder)
        mine = lease.where(studies.c.id == self.study_id).with_for_update()
        with self.database.writing() as connection:
            self._check_mine(connection.execute(mine).one_or_none())
            yield connection

    def _check_mine(self, row: Any) -> None:
        if row is None or row.lease_token != self.token:
            holder = row.lease_holder if row is not None else None
            by = f"; {Holder.from_plain(holder)} holds it now" if holder else ""
            raise StudyRefusedError(
                f"study '{self.study}' was taken from this coordinator{by}. This one stops and "
                "writes nothing more"
            )

    def wishes(self) -> Wishes:
        """What is asked of this coordinator. Raises StudyRefusedError as `writing` does."""
        columns = (studies.c.lease_token, studies.c.lease_holder, studies.c.request, studies.c.spec)
        with self.database.reading() as connection:
            found = sa.select(*columns).where(studies.c.id == self.study_id)
            row = connection.execute(found).one_or_none()
        self._check_mine(row)
        assert row is not None
        request = Request(row.request) if row.request is not None else None
        return Wishes(request, SearchSpec.model_validate(row.spec["search"]))

    def _update_study(self, **values: Any) -> None:
        with self.writing() as connection:
            connection.execute(
                sa.update(studies).where(studies.c.id == self.study_id).values(**values)
            )

    def renew(self, seconds_run: float) -> None:
        """Sign of life, and how long the study has run in all."""
        until = datetime.now(UTC) + timedelta(seconds=LEASE_S)
        self._update_study(lease_until=until, seconds_run=seconds_run)

    def release(self, stop_reason: str, seconds_run: float) -> None:
        """Give the study back."""
        self._update_study(
            lease_token=None,
            lease_holder=None,
            lease_until=None,
            request=None,
            stop_reason=stop_reason,
            seconds_run=seconds_run,
        )

    def set_stop_reason(self, stop_reason: str) -> None:
        """Note why the study stops, while it is still held."""
        self._update_study(stop_reason=stop_reason)

    def check(self) -> None:
        """Raise StudyRefusedError if the study is no longer this coordinator's."""
        with self.writing():
            pass

    def set_reference(self, reference: Mapping[str, float]) -> None:
        """Fix the hypervolume's reference point."""
        self._update_study(reference=dict(reference))

    def set_device_model(self, device_model: str) -> None:
        """Note the device model that this study's latencies belong to."""
        self._update_study(device_model=device_model)

    def add_trial(self, new: NewTrial) -> None:
        """Store a proposal; it is pending until `finish`."""
        with self.writing() as connection:
            connection.execute(
                sa.insert(trials).values(
                    study_id=self.study_id,
                    number=new.number,
                    state=TrialState.PENDING,
                    arch_hash=new.arch.arch_hash,
                    arch=json.loads(new.arch.canonical_json),
                    params=dict(new.params),
                    sampler_notes=dict(new.sampler_notes),
                    told=new.told,
                    metrics=dict(new.metrics),
                    violations=[],
                    duplicate_of=new.duplicate_of,
                    message="",
                    traceback="",
                    proposed_at=datetime.now(UTC),
                    from_cache=False,
                )
            )

    def set_optuna_number(self, number: int, optuna_number: int) -> None:
        """Note which of Optuna's trials shows this one."""
        with self.writing() as connection:
            connection.execute(
                sa.update(trials).where(self._is(number)).values(optuna_number=optuna_number)
            )

    def start_attempt(self, number: int, token: str) -> None:
        """Begin one try at a trial; `token` names it from here on."""
        trial_id = sa.select(trials.c.id).where(self._is(number)).scalar_subquery()
        with self.writing() as connection:
            last = connection.scalar(
                sa.select(sa.func.max(attempts.c.attempt)).where(attempts.c.trial_id == trial_id)
            )
            connection.execute(
                sa.insert(attempts).values(
                    trial_id=trial_id,
                    attempt=1 if last is None else last + 1,
                    token=token,
                    state=AttemptState.RUNNING,
                    started_at=datetime.now(UTC),
                    message="",
                )
            )

    def note_started(self, token: str, started: Started) -> None:
        """Where an attempt runs."""
        with self.writing() as connection:
            connection.execute(
                sa.update(attempts)
                .where(attempts.c.token == token)
                .values(node=started.node, pid=started.pid, device_model=started.device_model)
            )

    def renew_attempts(self, device_seconds: Mapping[str, float], lease_s: float) -> None:
        """Signs of life of attempts, by token, and what each has used so far."""
        until = datetime.now(UTC) + timedelta(seconds=lease_s)
        with self.writing() as connection:
            for token, used in device_seconds.items():
                connection.execute(
                    sa.update(attempts)
                    .where(attempts.c.token == token)
                    .values(lease_until=until, device_seconds=used)
                )

    def add_rung(self, token: str, rung: Rung) -> None:
        """One evaluation on the selection split."""
        attempt_id = sa.select(attempts.c.id).where(attempts.c.token == token).scalar_subquery()
        with self.writing() as connection:
            connection.execute(
                sa.insert(rungs).values(attempt_id=attempt_id, rung=rung.rung, report=plain(rung))
            )

    def note_late_answer(self, token: str, answer: Mapping[str, Any]) -> None:
        """Keep what came after an attempt was given up. It changes nothing."""
        with self.writing() as connection:
            connection.execute(
                sa.update(attempts)
                .where(attempts.c.token == token)
                .values(late_answer=dict(answer))
            )

    def lose_attempts(self, number: int, message: str) -> None:
        """End every attempt of a trial that an earlier coordinator left running."""
        trial_id = sa.select(trials.c.id).where(self._is(number)).scalar_subquery()
        running = sa.and_(attempts.c.trial_id == trial_id, attempts.c.state == AttemptState.RUNNING)
        with self.writing() as connection:
            connection.execute(
                sa.update(attempts).where(running).values(**_lost(FailureClass.LOST, message, ""))
            )

    def fail_attempt(
        self, token: str, failure: FailureClass, message: str, traceback: str = ""
    ) -> None:
        """End one attempt without a verdict on its trial, which may be tried again."""
        with self.writing() as connection:
            connection.execute(
                sa.update(attempts)
                .where(attempts.c.token == token)
                .values(**_lost(failure, message, traceback))
            )

    def finish(self, number: int, verdict: Verdict, token: str | None = None) -> bool:
        """End a trial, and with it the attempt `token` if one decided it.

        Returns:
            False, with nothing changed, if the trial is final or `token` not its newest attempt.
        """
        now = datetime.now(UTC)
        with self.writing() as connection:
            row = connection.execute(
                sa.select(trials.c.id, trials.c.state, trials.c.metrics).where(self._is(number))
            ).one()
            if row.state != TrialState.PENDING or not _is_newest(connection, row.id, token):
                return False
            connection.execute(
                sa.update(trials)
                .where(trials.c.id == row.id)
                .values(
                    state=verdict.state,
                    metrics={**row.metrics, **verdict.metrics},
                    violations=list(verdict.violations),
                    failure=verdict.failure,
                    message=verdict.message,
                    traceback=verdict.traceback,
                    finished_at=now,
                    from_cache=verdict.from_cache,
                    evaluation_id=verdict.evaluation_id,
                    profile_id=verdict.profile_id,
                )
            )
            if token is not None:
                ended = (
                    _lost(verdict.failure, verdict.message, verdict.traceback)
                    if verdict.failure is not None
                    else {"state": AttemptState.DONE, "finished_at": now}
                )
                connection.execute(
                    sa.update(attempts).where(attempts.c.token == token).values(**ended)
                )
        return True

    def confirm(self, number: int, evaluation_id: int, token: str | None) -> None:
        """Give a trial the evaluation by fresh seeds; it is published anew."""
        with self.writing() as connection:
            connection.execute(
                sa.update(trials)
                .where(self._is(number))
                .values(confirmation_id=evaluation_id, published_at=None)
            )
            if token is not None:
                ended = {"state": AttemptState.DONE, "finished_at": datetime.now(UTC)}
                connection.execute(
                    sa.update(attempts).where(attempts.c.token == token).values(**ended)
                )

    def _is(self, number: int) -> sa.ColumnElement[bool]:
        return sa.and_(trials.c.study_id == self.study_id, trials.c.number == number)


def _lost(failure: FailureClass, message: str, traceback: str) -> dict[str, Any]:
    return {
        "state": AttemptState.FAILED,
        "failure": failure,
        "message": message,
        "traceback": traceback,
        "finished_at": datetime.now(UTC),
    }


def _is_newest(connection: sa.Connection, trial_id: int, token: str | None) -> bool:
    if token is None:
        return True
    newest = (
        sa.select(attempts.c.token)
        .where(attempts.c.trial_id == trial_id)
        .order_by(attempts.c.attempt.desc())
        .limit(1)
    )
    return connection.scalar(newest) == token
