"""A database of the very first schema is upgraded when it is opened, and everything in it is kept.

`tests/data/first_schema.*.sql` was written by the first migration and a study of four pretended
trials.
"""

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from archsearch.errors import FailureClass
from archsearch.records import AttemptState, TrialState
from archsearch.store import Store, control
from archsearch.store.claim import claim
from archsearch.store.ledger import Verdict

DATA = Path(__file__).parent.parent / "data"


def sqlite_of_first_schema(folder: Path) -> str:
    path = folder / "archsearch.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((DATA / "first_schema.sqlite.sql").read_text())
    connection.close()
    return f"sqlite:///{path}"


def postgres_of_first_schema(url: str) -> str:
    """A database of its own on that server."""
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE first_schema")
    server.dispose()
    made = sa.make_url(url).set(database="first_schema")
    database = sa.create_engine(made)
    with database.begin() as connection:
        connection.exec_driver_sql((DATA / "first_schema.postgresql.sql").read_text())
    database.dispose()
    return made.render_as_string(hide_password=False)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_first_schema_is_read_and_goes_on(
    tmp_path: Path, dialect: str, request: pytest.FixtureRequest
) -> None:
    if dialect == "sqlite":
        url = sqlite_of_first_schema(tmp_path)
    else:
        url = postgres_of_first_schema(request.getfixturevalue("postgres_url"))
    with Store(url) as store:
        study, trials = store.study("stub"), store.trials("stub")
        assert (study.stop_reason, study.coordinator, study.request) == ("trials", None, None)
        assert (study.spec.search.trials, study.spec.search.failures) == (4, None)
        assert study.device_seconds == 0.0
        complete, failed = TrialState.COMPLETE, TrialState.FAILED
        assert [one.state for one in trials] == [complete, complete, failed, complete]
        assert all(one.evaluation and one.profile for one in trials if one.state is complete)
        assert trials[2].failure is FailureClass.DIVERGED
        lost, done = trials[1].attempts
        assert (lost.state, done.state) == (AttemptState.FAILED, AttemptState.DONE)
        assert (lost.failure, done.node, lost.traceback) == (FailureClass.LOST, "worker-1", "")

        assert control.retry(store, "stub", None, []) == [2]
        ledger = claim(store, study.spec, (), {})
        ledger.start_attempt(2, "again")
        ledger.renew_attempts({"again": 2.5}, 60.0)
        failure = Verdict(failed, failure=FailureClass.DIVERGED, traceback="Traceback")
        assert ledger.finish(2, failure, "again")
        last = store.trial("stub", 2).attempts[-1]
        assert (last.traceback, last.device_seconds) == ("Traceback", 2.5)
        assert store.study("stub").device_seconds == 2.5
