"""The same service on PostgreSQL, as on a cluster: one database for us and for Optuna."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from service_cases import check_books, run, starts, stored
from stub_trials import changed, stub_study

from archsearch.errors import ServiceError, StudyRefusedError
from archsearch.spec import StudySpec
from archsearch.store import Store, database
from archsearch.store.claim import claim
from archsearch.store.database import VERSION_TABLE
from archsearch.store.tables import metadata


def on_postgres(spec: StudySpec, url: str) -> StudySpec:
    return changed(spec, "tracking", storage=url)


@pytest.mark.usefixtures("ray_here")
def test_a_study_runs_goes_on_and_is_reused(tmp_path: Path, postgres_url: str) -> None:
    spec = on_postgres(stub_study(tmp_path, orders={"kill_once": [2]}), postgres_url)
    assert run(spec, trials=4).last.complete == 4
    assert run(spec, trials=8).last.complete == 8
    check_books(spec)
    trained = starts(tmp_path).total()
    other = on_postgres(stub_study(tmp_path, "other", {"kill_once": [2]}), postgres_url)
    assert run(other, trials=8).last.complete == 8
    assert starts(tmp_path).total() == trained
    assert [one.arch for one in stored(other)] == [one.arch for one in stored(spec)]

    on_sqlite = tmp_path / "sqlite"
    on_sqlite.mkdir()
    same = stub_study(on_sqlite)
    run(same, trials=8)
    assert [one.arch for one in stored(same)] == [one.arch for one in stored(spec)]


def test_claims_at_the_same_moment_give_one_holder(tmp_path: Path, postgres_url: str) -> None:
    """Also the first opening of a fresh database, by four at once."""
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE fresh")
    engine.dispose()
    url = sa.make_url(postgres_url).set(database="fresh").render_as_string(hide_password=False)
    spec = on_postgres(stub_study(tmp_path), url)
    barrier, outcomes = threading.Barrier(4), list[str]()

    def claim_it() -> None:
        barrier.wait()
        with Store(url, create=True) as store:
            try:
                claim(store, spec, (), {})
                outcomes.append("held")
            except StudyRefusedError:
                outcomes.append("refused")

    threads = [threading.Thread(target=claim_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused", "refused", "refused"]


def test_migrations_make_the_tables_that_the_code_uses(postgres_url: str) -> None:
    def is_ours(_object: object, name: str | None, kind: str, *_rest: object) -> bool:
        # Optuna's tables live beside ours.
        return kind != "table" or str(name).startswith("archsearch_")

    with Store(postgres_url) as store, store.database.reading() as connection:
        options = {
            "version_table": VERSION_TABLE,
            "compare_type": True,
            "include_object": is_ours,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def test_who_is_silent_in_a_transaction_keeps_no_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a coordinator does that is frozen, or whose machine is lost without a word."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    url = sa.make_url(postgres_url).update_query_dict({"options": "-c application_name=silent"})
    lock = sa.text("LOCK TABLE archsearch_studies")

    def fall_silent(silent: Store, other: Store) -> None:
        with silent.database.writing() as connection:
            assert connection.exec_driver_sql("SHOW application_name").scalar() == "silent"
            connection.execute(lock)
            with other.database.writing() as free:  # waits until the server has had enough
                free.execute(lock)
            connection.execute(sa.text("SELECT 1"))

    with (
        Store(url.render_as_string(hide_password=False), create=True) as silent,
        Store(postgres_url) as other,
        pytest.raises(ServiceError, match="idle-in-transaction"),
    ):
        fall_silent(silent, other)


def test_a_database_that_does_not_exist_is_said_to_be_none(postgres_url: str) -> None:
    url = sa.make_url(postgres_url).set(database="nowhere")
    with pytest.raises(ServiceError, match='database "nowhere" does not exist'):
        Store(url.render_as_string(hide_password=False))
