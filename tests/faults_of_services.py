"""Faults of what a study stands on: databases, disks, MLflow, Ray itself, the machine's memory."""

import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fault_cases import Site
from fault_driver import LOCAL, Moment, at, drive, stand
from faults_of_coordinators import MOMENTS
from servers import MlflowServer, free_port, postgres_server
from service_cases import held, starts, stored
from sqlalchemy.engine import Engine

from archsearch.coordinator import run
from archsearch.errors import FailureClass, ServiceError
from archsearch.records import TrialState
from archsearch.store import Store

Case = Callable[[Site], None]


def _is_said(said: str, error: str) -> None:
    assert said.startswith("ServiceError") and error in said, said


def _sqlite_is_full(site: Site) -> None:
    """Its file may not grow any more: what SQLite says then is what it says of a full disk."""
    site.trials = 12  # so many that they cannot fit in pages that are half full
    said = site.fork(_no_more_pages).end()
    _is_said(said, "database or disk is full")
    assert len([one for one in stored(site.spec) if one.state.is_final]) < site.trials


def _no_more_pages(_home: Path) -> None:
    at(MOMENTS["after the claim"], partial(sa.event.listen, Engine, *_LIMIT))


def _limit_pages(connection: sa.Connection, cursor: Any, *_statement: object) -> None:
    """Each connection has a limit of its own; one below what is there is what is there."""
    if Path(connection.engine.url.database or "").name == "archsearch.db":
        cursor.execute("PRAGMA max_page_count = 1")


_LIMIT = ("before_cursor_execute", _limit_pages)


def _disk_is_full(_home: Path) -> None:
    write, limit = Path.write_bytes, itertools.count(1)

    def write_some(path: Path, content: bytes) -> int:
        if path.suffix == ".tmp" and next(limit) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    Path.write_bytes = write_some  # type: ignore[assignment, method-assign]


def _weights_do_not_fit(site: Site) -> None:
    _is_said(site.fork(_disk_is_full).end(), "No space left on device")


def _postgres_is_full(table: str, site: Site) -> None:
    """A trigger says what PostgreSQL says when its disk is full."""
    with Store(site.spec.tracking.storage, create=True) as store:
        drive(site.spec.model_copy(update={"study": f"{site.study} before"}))
        with store.database.writing() as connection:
            connection.exec_driver_sql(_FULL)
            connection.exec_driver_sql(
                f"CREATE TRIGGER full_disk BEFORE UPDATE ON {table} FOR EACH ROW "
                "WHEN (OLD.number = 3) EXECUTE FUNCTION full_disk()"
            )
        try:
            with pytest.raises(ServiceError, match="No space left on device"):
                drive(site.spec)
        finally:
            with store.database.writing() as connection:
                connection.exec_driver_sql(f"DROP TRIGGER full_disk ON {table}")


_FULL = """
CREATE OR REPLACE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
END $$
"""


def _postgres_restarts(moment: Moment, site: Site) -> None:
    port = free_port()
    restart = site.servers.enter_context(postgres_server("127.0.0.1", port))
    site.storage = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
    fork = site.fork(partial(stand, moment))
    fork.wait_until_it_stands()
    restart()
    fork.go_on()
    said = fork.end()
    assert said == "trials" or said.startswith("ServiceError: "), said


def _mlflow_is_down(site: Site) -> None:
    """For the whole run; then it is back."""
    database, site.mlflow = site.mlflow, f"http://127.0.0.1:{free_port()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "PUBLISH_S", 0.5)
        assert drive(site.spec) == "trials"
    with Store(site.spec.tracking.storage) as store:
        assert len(store.unpublished(site.study)) == len(stored(site.spec))
    server = MlflowServer(site.folder, "server", "--backend-store-uri", database)
    site.mlflow = site.servers.enter_context(server).url


def _ray_dies(part: str, site: Site) -> None:
    fork = site.fork(partial(_kill_part, part), LOCAL)
    fork.end()
    assert fork.reached
    assert TrialState.FAILED not in {one.state for one in stored(site.spec)}


def _kill_part(part: str, home: Path) -> None:
    os.environ.update({"RAY_gcs_rpc_server_reconnect_timeout_s": "2"})
    moment = Moment("archsearch.cluster.cluster:Cluster.submit", True, 3)
    at(moment, partial(_kill_child, part, home))


def _kill_child(part: str, home: Path) -> None:
    (home / "reached").touch()
    me = str(os.getpid())
    out = subprocess.run(["pgrep", "-P", me, "-f", part], capture_output=True, text=True)
    (child,) = out.stdout.split()
    os.kill(int(child), signal.SIGKILL)


def _memory_ends(site: Site) -> None:
    """Ray takes the machine's memory for full and kills what uses most of it."""
    site.orders, site.may_fail, site.trials = {"hold": list(range(20))}, True, 2
    with held(site.folder):
        said = site.fork(_no_memory, LOCAL).end()
    assert said == "trials"
    trials = stored(site.spec)
    assert {one.failure for one in trials} == {FailureClass.OUT_OF_MEMORY}
    assert max(starts(site.folder).values(), default=0) <= 1, "Ray tries nothing again"


def _no_memory(_home: Path) -> None:
    settings = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    os.environ.update(settings)


CASES: dict[str, Case] = {
    "the disk is full for SQLite": _sqlite_is_full,
    "the disk is full for weights": _weights_do_not_fit,
    "Postgres restarts between transactions": partial(_postgres_restarts, MOMENTS["after ask"]),
    "Postgres restarts in a transaction": partial(
        _postgres_restarts, Moment("archsearch.store.results:_put", False, 3)
    ),
    "MLflow is down for the whole run": _mlflow_is_down,
    "the raylet gets kill -9": partial(_ray_dies, "raylet/raylet "),
    "the head gets kill -9": partial(_ray_dies, "gcs_server"),
    "the machine's memory ends": _memory_ends,
}
ON_POSTGRES: dict[str, Case] = {
    "the disk is full for our tables": partial(_postgres_is_full, "archsearch_trials"),
    "the disk is full for Optuna's tables": partial(_postgres_is_full, "trials"),
}
