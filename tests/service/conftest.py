"""Servers that service tests share in a session, because starting them takes seconds."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from archsearch.cluster import Cluster
from archsearch.spec import ResourcesSpec

TESTS = Path(__file__).parent.parent


def inherited_path() -> list[str]:
    """Where else Python was told to look for modules."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray that `run_study` finds running in this process and leaves running."""
    # Workers import the pretended trials from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *inherited_path()])
    os.environ["RAY_OVERRIDE_RESOURCES"] = '{"GPU": 2}'  # pretended too: Ray only counts them
    cluster = Cluster(ResourcesSpec(), None)
    yield
    cluster.close()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of an empty database on a PostgreSQL server of our own.

    The server refuses to run as root; then it runs as Debian's user `postgres`.
    """
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert programs, "these tests need PostgreSQL: apt-get install postgresql"
    folder = Path(tempfile.mkdtemp(prefix="archsearch-postgres-"))
    as_user: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    data, log = str(folder / "data"), str(folder / "log")

    def call(program: str, *arguments: str) -> None:
        command = [*as_user, str(programs[-1] / program), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call("initdb", "-D", data, "-A", "trust", "-U", "archsearch", "--no-sync")
    settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    call("pg_ctl", "-D", data, "-l", log, "-w", "-o", settings, "start")
    yield f"postgresql+psycopg://archsearch@127.0.0.1:{port}/postgres"
    call("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    shutil.rmtree(folder)
