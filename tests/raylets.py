"""A real Ray cluster of several nodes on this machine, each with an address of the loopback."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from servers import free_port

RAY = str(Path(sys.executable).parent / "ray")
_OBJECT_STORE_BYTES = 80 * 2**20


class Raylets:
    """A head that runs no trials, and nodes that join. A context manager.

    Args:
        environment: of every node, and of whoever connects.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-")  # names of sockets must be short
        self._hosts = (f"127.0.0.{last}" for last in itertools.count(2))
        self._started: list[subprocess.Popen[str]] = []
        # Tests that opened a Ray in this process have left settings: no second node, two GPUs.
        inherited = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            **inherited,
            **environment,
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "7" * 64,
            "RAY_enable_metrics_collection": "0",
            "RAY_health_check_period_ms": "500",  # a dead node is noticed in seconds
        }
        host, port, dashboard_port = next(self._hosts), free_port(), free_port()
        self.address = f"{host}:{port}"
        self.dashboard = f"http://{host}:{dashboard_port}"
        head = ["--head", f"--port={port}", "--num-cpus=0", f"--dashboard-host={host}"]
        options = [*head, f"--dashboard-port={dashboard_port}"]
        self.wait_for(self._start(host, options, {}))

    def add(
        self, cpus: int, device: str | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a node that may have a device of this name; `wait_for` it."""
        resources = {f"accelerator_type:{device}": 1} if device is not None else {}
        options = [f"--address={self.address}", f"--num-cpus={cpus}"]
        options.append(f"--resources={json.dumps(resources)}")
        return self._start(next(self._hosts), options, environment or {})

    def _start(
        self, host: str, options: list[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        # Nodes that share a folder and start at once quarrel over names of sockets. In the head's,
        # Ray looks for the address `auto`.
        folder = "ray" if "--head" in options else host[-1]
        own = [f"--temp-dir={self._folder}/{folder}", f"--node-ip-address={host}"]
        own += [f"--dashboard-agent-listen-port={free_port()}"]
        own += [f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        self._started.append(
            subprocess.Popen(
                [RAY, "start", "--block", *own, *options],
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self._started[-1]

    def wait_for(self, node: subprocess.Popen[str]) -> None:
        """Return once a node has joined."""
        assert node.stdout is not None
        said = []
        for line in node.stdout:
            said.append(line)
            if "will now block" in line:
                return
        raise RuntimeError("".join(said))

    def kill_raylet(self, node: subprocess.Popen[str]) -> None:
        """Kill the process that makes a node one, as a machine that goes down does."""
        out = subprocess.run(
            ["pgrep", "-P", str(node.pid), "-f", "raylet/raylet"], capture_output=True, text=True
        )
        os.kill(int(out.stdout), signal.SIGKILL)

    def _processes(self) -> list[int]:
        """All that belong to us, whoever their parents are."""
        mark = f"RAY_TMPDIR={self._folder}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def __enter__(self) -> "Raylets":
        return self

    def __exit__(self, *_: object) -> None:
        while found := self._processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.wait()
        for process in self._started:
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self._folder)
