"""docker-compose.yml without Docker: the same commands and environments as processes here.

What differs from containers is in `_HERE` and in `Deployment._environment`, and in nothing else.
PostgreSQL alone comes without a command, because its image brings one; Debian's server stands in,
with the password that the image would set.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from servers import free_port, postgres_server

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.2"
"""Stands for every service's address. Ray would put the machine's own for 127.0.0.1, which stays
what it is in a container: an address that nobody else reaches."""

_HERE = re.compile(
    r"(?P<host>(?<![\w-])(?:postgres|mlflow|dashboard|ray-head)(?=:\d)|(?<=address=)ray-head|0\.0\.0\.0)"
    r"|(?P<port>\b(?:5432|5000|8080|8081|6379)\b)"
    r"|(?P<path>(?<![\w/])/(?:opt|var|studies|tmp)(?=/))"
)
"""What is another here: host names, ports (any free one), and paths (below a folder)."""

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(:[?-])([^}]*)\})")


def read_compose() -> dict[str, Any]:
    """docker-compose.yml as it is written."""
    parsed: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
    return parsed


def interpolated(value: Any, given: Mapping[str, str]) -> Any:
    """Fill variables in as Compose does. Raises LookupError for one that is missing or empty."""

    def fill(found: re.Match[str]) -> str:
        name, otherwise, text = found.groups()
        if name is None:
            return "$"
        if not given.get(name) and otherwise == ":?":
            raise LookupError(f"{name} {text}")
        return given.get(name) or text

    if isinstance(value, dict):
        return {key: interpolated(one, given) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one, given) for one in value]
    return _VARIABLE.sub(fill, value) if isinstance(value, str) else value


def made_secrets(folder: Path) -> dict[str, str]:
    """What `make .env` makes."""
    for name in ("Makefile", ".env.example"):
        shutil.copy(ROOT / name, folder)
    subprocess.run(["make", "-s", ".env", f"PYTHON={sys.executable}"], cwd=folder, check=True)
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


class Deployment:
    """The services, started in the order of their dependencies. A context manager.

    Args:
        folder: holds every file that they read or write.
        secrets: what `.env` says.
    """

    def __init__(self, folder: Path, secrets: Mapping[str, str]) -> None:
        self.services: dict[str, Any] = interpolated(read_compose(), secrets)["services"]
        self.secrets = secrets
        self._folder = folder
        self._ports: dict[str, int] = {}
        self._ray_folder = tempfile.mkdtemp(prefix="ray-")  # names of sockets must be short
        self._started: list[subprocess.Popen[bytes]] = []
        self._latest: dict[str, subprocess.Popen[bytes]] = {}
        self._exit = contextlib.ExitStack()
        for place in ("tmp", "studies", "var/lib/mlflow", "var/lib/archsearch"):
            (folder / place).mkdir(parents=True)
        (folder / "opt/archsearch/deploy").mkdir(parents=True)
        for file in (ROOT / "deploy").iterdir():
            (folder / "opt/archsearch/deploy" / file.name).write_text(self._here(file.read_text()))
        if os.getuid() == 0:  # which no image is; nginx would give its workers to another user
            configuration = folder / "opt/archsearch/deploy/nginx.conf"
            configuration.write_text("user root;\n" + configuration.read_text())

    def address(self, port: int) -> str:
        """Where a port of the compose file is here, as HOST:PORT."""
        return f"{HOST}:{self.port(port)}"

    def port(self, port: int) -> int:
        return self._ports.setdefault(str(port), free_port())

    def _here(self, text: str) -> str:
        def replace(found: re.Match[str]) -> str:
            if found["host"]:
                return HOST
            if found["port"]:
                return str(self.port(int(found["port"])))
            return f"{self._folder}{found['path']}"

        return _HERE.sub(replace, text)

    def _environment(self, service: str) -> dict[str, str]:
        """What the service is given, and what an image sets."""
        programs = [Path(sys.executable).parent, *Path("/usr/lib/postgresql").glob("*/bin")]
        given = self.services[service].get("environment", {})
        return {
            "PATH": ":".join(map(str, [*programs, "/usr/sbin", "/usr/bin", "/bin"])),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(self._folder),
            "RAY_TMPDIR": self._ray_folder,
        } | {name: self._here(value) for name, value in given.items()}

    def _command(self, service: str) -> list[str]:
        said = self.services[service]
        parts = [said.get("entrypoint", []), said["command"]]
        split = [shlex.split(one) if isinstance(one, str) else one for one in parts]
        return [self._here(word) for one in split for word in one]

    def start(self, service: str) -> None:
        """Start a service as soon as those that it depends on are ready."""
        for other, wanted in self.services[service].get("depends_on", {}).items():
            self._wait(other, wanted["condition"])
        if service == "postgres":
            password = self.services[service]["environment"]["POSTGRES_PASSWORD"]
            self._exit.enter_context(postgres_server(HOST, self.port(5432), password))
            return
        with (self._folder / f"{service}.log").open("ab") as log:
            self._latest[service] = subprocess.Popen(
                self._command(service),
                cwd=self._folder / "var/lib/archsearch",
                env=self._environment(service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(self._latest[service])

    def _wait(self, service: str, condition: str) -> None:
        if condition == "service_completed_successfully":
            self.finish(service)
            return
        assert condition == "service_healthy"
        while self.check(service) != 0:
            # Both a pause and a look whether it died.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._latest[service].wait(0.2)
                raise RuntimeError(self.log(service))

    def finish(self, service: str) -> None:
        """Wait until a service has done its work."""
        if self._latest[service].wait() != 0:
            raise RuntimeError(self.log(service))

    def check(self, service: str) -> int:
        """The exit status of a service's health check."""
        command = self._here(self.services[service]["healthcheck"]["test"])
        done = subprocess.run(
            ["sh", "-c", command], env=self._environment(service), capture_output=True
        )
        return done.returncode

    def log(self, service: str) -> str:
        return (self._folder / f"{service}.log").read_text()

    def processes(self) -> list[int]:
        """Every process of ours, also what `ray start` leaves behind, which has another parent."""
        mark = f"RAY_TMPDIR={self._ray_folder}".encode()
        # nginx writes its title over its environment.
        found = [process.pid for process in self._started if process.poll() is None]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._latest["dashboard"].wait(10)  # its children are found by nobody else
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.wait()
        self._exit.close()
        shutil.rmtree(self._ray_folder)


def listening(pids: list[int]) -> Iterator[tuple[str, int]]:
    """Address and port of every TCP socket on which one of these processes listens."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                # The last four bytes, each group of four turned round.
                quads = [str(byte) for byte in bytes.fromhex(address[-8:])[::-1]]
                yield ".".join(quads), int(port, 16)
