"""Which process holds a study, and whether it is certainly gone.

A process is its host, its number and when it started: numbers are used again. Only on the same
machine (same boot, same process namespace, so not the container next door) can one see that a
holder is gone; elsewhere its lease has to run out. Reads Linux's /proc; without one, nothing is
ever certain.
"""

import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

LEASE_S = 60.0
"""How long a study stays held without a sign of life. Renewed every few seconds."""
_FURTHEST_S = 2 * LEASE_S
"""No lease reaches further than this, if clocks agree to a minute: one that does was written by a
clock that has been put right, and its holder shows no sign of life any more."""


@dataclass(frozen=True)
class Holder:
    """One process on one machine."""

    host: str
    pid: int
    started: str
    """Kernel ticks after boot; empty if unknown."""
    machine: str
    """Boot and process namespace; empty if unknown."""

    @classmethod
    def this_process(cls) -> Self:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid) or "", _machine())

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        return cls(**plain)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"

    @property
    def is_gone(self) -> bool:
        """True only if this machine can tell that the process ended."""
        here = _machine()
        return bool(here) and self.machine == here and _started(self.pid) != self.started


def living_holder(study: sa.RowMapping) -> Holder | None:
    """Who holds a study, from its row; None if nobody does, or its coordinator is gone."""
    if study["lease_token"] is None:
        return None
    left_s = (study["lease_until"] - datetime.now(UTC)).total_seconds()
    if not 0 < left_s <= _FURTHEST_S:
        return None
    holder = Holder.from_plain(study["lease_holder"])
    return None if holder.is_gone else holder


def _started(pid: int) -> str | None:
    """When a process started; None if there is none, or only its unreaped remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command may hold spaces and brackets; the fields after its last bracket do not.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
