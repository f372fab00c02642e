"""Opens MLflow's user interface on a study's tracking URI: starts a server where one is needed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from archsearch.errors import ServiceError

START_TIMEOUT_S = 120.0
_HOST = "127.0.0.1"


def is_server(uri: str) -> bool:
    """True if a tracking URI is a server, which has a user interface of its own."""
    return uri.startswith(("http://", "https://"))


@contextmanager
def user_interface(uri: str, port: int) -> Iterator[tuple[str, bool]]:
    """Address of a running user interface, and whether it was started here.

    A server that is started here ends with the context.

    Raises:
        ServiceError: the port is taken, or the server ends or does not answer.
    """
    if is_server(uri):
        yield uri.rstrip("/"), False
        return
    _check_port(port)
    # Ended either way, the server must not be left behind: it is in a session of its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as log:
        server = _start(uri, port, log)
        try:
            _wait(server, port, log)
            yield f"http://{_HOST}:{port}", True
        finally:
            _end(server)


def _start(uri: str, port: int, log: TextIO) -> subprocess.Popen[bytes]:
    command = f"-m mlflow server --workers 1 --host {_HOST} --port {port} --backend-store-uri"
    return subprocess.Popen(
        [sys.executable, *command.split(), uri],
        stdout=log,
        stderr=log,
        # Job workers serve features that studies have no use for, and outlive their server.
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )


def _wait(server: subprocess.Popen[bytes], port: int, log: TextIO) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(port):
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.2)
            log.seek(0)
            last = log.read().strip().splitlines()[-1:]
            raise ServiceError(f"MLflow's server ended: {' '.join(last) or 'it said nothing'}")
        if time.monotonic() > deadline:
            raise ServiceError(f"MLflow's server did not answer within {START_TIMEOUT_S:g} s")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{_HOST}:{port}/version", timeout=2):
            return True
    except OSError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """Stop the server and the processes it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ServiceError(
                f"port {port} cannot be used ({error.strerror}); choose another with --port"
            ) from error


def wait_for_interrupt() -> None:
    """Return when the user presses Ctrl-C, or the process is told to end."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
