"""Real servers in processes of their own, for tests: MLflow and PostgreSQL."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def postgres_server(host: str, port: int, password: str = "") -> Iterator[Callable[[], None]]:
    """Debian's PostgreSQL, empty, with the superuser `postgres`; without a password, all may enter.

    Gives a function that restarts it, as after a crash. The server refuses to run as root; then it
    runs as Debian's user `postgres`.
    """
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert programs, "these tests need PostgreSQL: apt-get install postgresql"
    folder = Path(tempfile.mkdtemp(prefix="archsearch-postgres-"))
    data, secret = folder / "data", folder / "password"
    secret.write_text(password)
    as_user: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        shutil.chown(secret, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def call(program: str, *arguments: str) -> None:
        command = [*as_user, str(programs[-1] / program), "-D", str(data), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    method = ["-A", "scram-sha-256", f"--pwfile={secret}"] if password else ["-A", "trust"]
    call("initdb", "-U", "postgres", "--no-sync", *method)
    settings = f"-p {port} -k {folder} -c listen_addresses={host} -c fsync=off"
    call("pg_ctl", "-l", str(folder / "log"), "-w", "-o", settings, "start")
    try:
        yield lambda: call("pg_ctl", "-l", str(folder / "log"), "-w", "-m", "immediate", "restart")
    finally:
        call("pg_ctl", "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)


class MlflowServer:
    """`mlflow <command>` on a loopback port, in `folder`. A context manager."""

    def __init__(self, folder: Path, command: str = "server", *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._command = command
        self.start(*options)

    def start(self, *options: str) -> None:
        self._log = (self._folder / "server.log").open("a")
        command = f"{sys.executable} -m mlflow {self._command} --workers 1 --host 127.0.0.1"
        self._process = subprocess.Popen(
            [*command.split(), "--port", str(self.port), *options],
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
            # Job workers serve features that are not tested, and outlive their server.
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
        while not self._answers():
            # Both a pause and a look whether it died.
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError((self._folder / "server.log").read_text())

    def _answers(self) -> bool:
        question = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/experiments/search",
            data=b'{"max_results": 1}',
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(question, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return True  # it is up, and refuses: what some tests want
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it at once, as a machine that goes down does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._log.close()

    def __enter__(self) -> "MlflowServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
