"""Opening a database: SQLite or PostgreSQL settings, schema upgrades, and errors people understand.

SQLite runs in WAL mode, so that readers and the one writer do not block each other, waits up to a
minute for a lock, and takes the write lock at the start of every writing transaction (a reader
that turns writer halfway cannot wait). `synchronous=NORMAL` may lose the last transactions when the
power fails, never when a process is killed, and never breaks the file. PostgreSQL ends a
transaction whose client says nothing for a minute, so that one that is frozen keeps no locks from
the next. Knows no study.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from archsearch.errors import ServiceError

BUSY_TIMEOUT_S = 60.0
_AGAIN_S = 0.02
VERSION_TABLE = "archsearch_alembic_version"
_WRITES = "archsearch_writes"
_MIGRATION_LOCK = 0x61726368  # any fixed number: PostgreSQL's name for our advisory lock
_FOLDER = Path(__file__).parent.parent / "migrations"


class _SqliteConnection(sqlite3.Connection):
    """A connection with our settings from its first statement on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_wal()
        self.execute("PRAGMA synchronous=NORMAL")

    def _use_wal(self) -> None:
        """Change the journal mode once in a file's life.

        SQLite does not wait for a lock in this one statement, so that two first starts at once
        would fail without trying again.
        """
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                if self.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    self.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)


def engine_options(url: str) -> dict[str, Any]:
    """Keyword arguments for `create_engine` that every user of this database shares."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": BUSY_TIMEOUT_S, "factory": _SqliteConnection}}
    given = parsed.normalized_query.get("options", ())
    ours = f"-c idle_in_transaction_session_timeout={BUSY_TIMEOUT_S * 1000:.0f}"
    return {"pool_pre_ping": True, "connect_args": {"options": " ".join((ours, *given))}}


class Database:
    """One open database with the current schema. Usable from several threads.

    Args:
        url: SQLAlchemy URL of SQLite (a file) or PostgreSQL.
        create: make the SQLite file and our tables if they do not exist. Else `is_blank` says that
            there are none, and nothing is written.

    Raises:
        ServiceError: it cannot be reached, read or upgraded, or a newer archsearch wrote it.
    """

    def __init__(self, url: str, create: bool) -> None:
        self.url = _parse(url)
        self.place = self.url.render_as_string(hide_password=True)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            _check_file(self.url.database, self.place, create)
        with self._errors("opened"):
            try:
                self._engine = sa.create_engine(self.url, **engine_options(url))
            except ModuleNotFoundError as error:
                raise ServiceError(
                    f"database {self.place} needs the Python package '{error.name}'; "
                    "for PostgreSQL install archsearch[postgres]"
                ) from error
            if self.is_sqlite:
                sa.event.listen(self._engine, "connect", _on_sqlite_connect)
                sa.event.listen(self._engine, "begin", _on_sqlite_begin)
            self._upgrade(create)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment of the database."""
        with self._errors("read"), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that may write; committed at its end, undone if it raises."""
        with self._errors("written"), self._engine.connect() as connection:
            connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise  # a bug of ours, not a service that fails
        except DBAPIError as error:
            text = " ".join(str(error.orig).split())
            code = getattr(error.orig, "sqlite_errorcode", 0)
            if code & 0xFF == sqlite3.SQLITE_CANTOPEN:
                text += "; SQLite must be able to write in its folder, even to read"
            raise ServiceError(f"database {self.place} cannot be {done}: {text}") from error

    def _upgrade(self, create: bool) -> None:
        config = Config()
        config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
        scripts = ScriptDirectory.from_config(config)
        head = scripts.get_current_head()
        with self.reading() as connection:
            found = _revision(connection)
        self.is_blank = found is None and not create
        if found == head or self.is_blank:
            return
        known = {script.revision for script in scripts.walk_revisions()}
        if found is not None and found not in known:
            raise ServiceError(
                f"database {self.place} has schema {found}, written by a newer archsearch; "
                f"this one knows schemas up to {head}: upgrade archsearch, or use another database"
            )
        with self.writing() as connection:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config.attributes["connection"] = connection
            config.attributes["version_table"] = VERSION_TABLE
            command.upgrade(config, "head")


def _revision(connection: sa.Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
        name = parsed.get_backend_name()
    except ArgumentError as error:
        raise ServiceError(
            f"'{url}' is not a database URL; accepted: sqlite:///FILE, "
            "postgresql+psycopg://USER@HOST/NAME"
        ) from error
    if name not in ("sqlite", "postgresql"):
        raise ServiceError(f"database '{name}' is not supported; accepted: sqlite, postgresql")
    return parsed


def _check_file(database: str | None, place: str, create: bool) -> None:
    """Say early, and in our own words, what SQLite would say late and briefly."""
    if database in (None, "", ":memory:"):
        raise ServiceError(
            f"database {place} is in memory only; a study is kept in a file, such as "
            "sqlite:///archsearch.db"
        )
    path = Path(str(database))
    if not path.parent.is_dir():
        raise ServiceError(f"database {place} cannot be opened: no folder {path.parent.resolve()}")
    if not create and not path.is_file():
        raise ServiceError(
            f"there is no database {path.resolve()}; `archsearch run` makes one, or name another"
        )


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver opens no transactions of its own
    connection.execute("PRAGMA foreign_keys=ON")


def _on_sqlite_begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
