"""Faults of coordinators: killed, stopped, frozen, two of them, with a wrong clock or study."""

import contextlib
import os
import signal
import sqlite3
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fault_cases import Site
from fault_driver import Moment, drive, stand, strike
from service_cases import stored
from stub_trials import changed

from archsearch.errors import StudyRefusedError
from archsearch.store import Store, claim, holder, ledger
from archsearch.store.tables import studies

Case = Callable[[Site], None]
_PACKAGE = "archsearch.coordinator"
MOMENTS = {
    "after the claim": Moment(f"{_PACKAGE}.run:claim", True, 1),
    "before ask": Moment("archsearch.propose.sampler:Proposer.ask", False, 4),
    "after ask": Moment("archsearch.propose.sampler:Proposer.ask", True, 4),
    "after the trial is stored": Moment("archsearch.store.ledger:Ledger.add_trial", True, 4),
    "before Optuna shows it": Moment("archsearch.propose.mirror:Mirror.add", False, 4),
    "after Optuna shows it": Moment("archsearch.propose.mirror:Mirror.add", True, 4),
    "after the attempt is stored": Moment("archsearch.store.ledger:Ledger.start_attempt", True, 4),
    "after submit": Moment("pretended_cluster:PretendedCluster.submit", True, 4),
    "after a rung": Moment("archsearch.store.ledger:Ledger.add_rung", True, 3),
    "after the weights": Moment(f"{_PACKAGE}.desk:write_weights", True, 3),
    "after evaluation commit": Moment(f"{_PACKAGE}.desk:Desk.put_evaluation", True, 3),
    "after profile commit": Moment(f"{_PACKAGE}.desk:Desk.complete", False, 3),
    "before tell": Moment("archsearch.store.ledger:Ledger.finish", True, 3),
    "after tell": Moment("archsearch.propose.mirror:Mirror.tell", True, 3),
    "before publish": Moment("archsearch.tracking.view:View.publish", False, 3),
    "after publish": Moment("archsearch.store.reading:Store.mark_published", False, 3),
    "before the study is given back": Moment("archsearch.store.ledger:Ledger.release", False, 1),
}
_STOPPED_AT = (
    "before ask",
    "after ask",
    "after submit",
    "after evaluation commit",
    "after tell",
    "before publish",
)
_FROZEN_AT = (
    "after ask",
    "before Optuna shows it",
    "after evaluation commit",
    "before tell",
    "before publish",
)


def _killed(moment: Moment, site: Site) -> None:
    site.strike(moment, signal.SIGKILL)


def _stopped(moment: Moment, site: Site) -> None:
    site.strike(moment, signal.SIGTERM)


def _killed_again(site: Site) -> None:
    """Killed at work, and the next one while it repairs."""
    site.strike(MOMENTS["after submit"], signal.SIGKILL)
    site.strike(Moment("archsearch.propose.mirror:Mirror.add", True, 1), signal.SIGKILL)


def _frozen(moment: Moment, site: Site) -> None:
    """A coordinator stands still until its lease is over and another has done its work."""
    first = site.fork(partial(stand, moment))
    first.wait_until_it_stands()
    _freeze(first.pid, site)
    time_passes(site)
    assert drive(site.spec) == "trials"
    first.go_on()
    os.kill(first.pid, signal.SIGCONT)
    assert first.end().startswith("StudyRefusedError: study")


def _freeze(pid: int, site: Site) -> None:
    """Stop a process, its heartbeat too, where it holds no lock of the database.

    One that is frozen within a write keeps all others from writing to SQLite until it goes on, and
    from what it wrote to PostgreSQL until that has enough of waiting.
    """
    while True:
        os.kill(pid, signal.SIGSTOP)
        if site.storage is not None:
            if not _is_in_transaction(site.storage):
                return
            os.kill(pid, signal.SIGCONT)
            continue
        with contextlib.closing(sqlite3.connect(site.folder / "archsearch.db", timeout=0)) as own:
            try:
                own.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
            own.execute("PRAGMA busy_timeout = 10000")
            own.execute("BEGIN IMMEDIATE")  # waits until it has written


def _is_in_transaction(storage: str) -> bool:
    """True while anybody but this question has a transaction, or a statement that runs."""
    others = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE state <> 'idle' "
        "AND datname = current_database() AND pid <> pg_backend_pid()"
    )
    engine = sa.create_engine(storage, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return bool(connection.scalar(others))


def time_passes(site: Site) -> None:
    """Move the lease of a study back, as if it were twice its length later."""
    mine = studies.c.name == site.study
    with Store(site.spec.tracking.storage) as store, store.database.writing() as connection:
        until = connection.scalar(sa.select(studies.c.lease_until).where(mine))
        assert until is not None
        earlier = until - timedelta(seconds=2 * holder.LEASE_S)
        connection.execute(sa.update(studies).where(mine).values(lease_until=earlier))


def _second_refused(site: Site) -> None:
    first = site.fork(partial(stand, MOMENTS["after submit"]))
    first.wait_until_it_stands()
    before = stored(site.spec)
    with pytest.raises(StudyRefusedError, match=f"held by another coordinator: .* {first.pid};"):
        drive(site.spec)
    assert stored(site.spec) == before
    first.go_on()
    assert first.end() == "trials"


def _two_at_once(site: Site) -> None:
    said = sorted(fork.end() for fork in [site.fork(_nothing), site.fork(_nothing)])
    assert said[-1] == "trials"
    assert said[0] == "trials" or said[0].startswith("StudyRefusedError"), said


def _nothing(_home: Path) -> None:
    pass


def _wrong_clock(days: float, site: Site) -> None:
    """The clock of a coordinator is wrong, and it is killed on a machine that nobody here sees."""
    said = site.fork(partial(_die_with_wrong_clock, days)).end()
    assert said == f"exit code {-signal.SIGKILL}"
    with Store(site.spec.tracking.storage) as store, store.database.writing() as connection:
        mine = studies.c.name == site.study
        held = connection.scalar(sa.select(studies.c.lease_holder).where(mine))
        elsewhere = {"lease_holder": {**held, "machine": "elsewhere"}}
        connection.execute(sa.update(studies).where(mine).values(**elsewhere))
    time_passes(site)


def _die_with_wrong_clock(days: float, home: Path) -> None:
    set_clock(timedelta(days=days))
    strike(MOMENTS["after evaluation commit"], signal.SIGKILL, home)


def set_clock(by: timedelta) -> None:
    """Put the clock of this process's leases forward."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + by

    for module in (claim, holder, ledger):
        module.datetime = Clock  # type: ignore[attr-defined]


def _changed_space(site: Site) -> None:
    site.strike(MOMENTS["after evaluation commit"], signal.SIGKILL)
    before = stored(site.spec)
    layers = site.spec.model.layers[:1]
    other = site.spec.model_copy(
        update={"model": site.spec.model.model_copy(update={"layers": layers})}
    )
    for changed_study in (other, changed(site.spec, "train", epochs=2)):
        with pytest.raises(StudyRefusedError, match=r"these parts differ: (model|train)"):
            drive(changed_study)
    assert stored(site.spec) == before


CASES: dict[str, Case] = {
    **{f"kill -9 {name}": partial(_killed, moment) for name, moment in MOMENTS.items()},
    **{f"SIGTERM {name}": partial(_stopped, MOMENTS[name]) for name in _STOPPED_AT},
    "kill -9 in the repair after a kill -9": _killed_again,
    **{f"frozen {name}, taken over": partial(_frozen, MOMENTS[name]) for name in _FROZEN_AT},
    "a second coordinator while the first works": _second_refused,
    "two coordinators started at once": _two_at_once,
    "a clock two days ahead, then put right": partial(_wrong_clock, 2),
    "a clock two days behind, then put right": partial(_wrong_clock, -2),
    "another space on resume": _changed_space,
}
