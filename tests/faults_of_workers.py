"""Faults of workers and of coordinators with trials on a real Ray, which all cases share."""

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fault_cases import Site
from fault_driver import Moment, drive
from pretended_cluster import PretendedCluster
from service_cases import held, stored
from stub_trials import run_stub

from archsearch.cluster import Alive, Answer, Arrival, Cluster, Gone, Up
from archsearch.coordinator import loop
from archsearch.errors import FailureClass, ServiceError
from archsearch.messages import TrialRequest
from archsearch.records import TrialState

Case = Callable[[Site, str], None]
"""Gets the address of Ray."""
LOST = FailureClass.LOST


def _ordered(order: str, ends: list[FailureClass | None], site: Site, address: str) -> None:
    """The second trial that runs misbehaves."""
    site.orders = {order: [1], "seeds": 2}
    site.may_fail = ends[-1] is not None
    assert drive(site.spec, address) == "trials"
    assert site.attempts(1) == ends
    others = [one for one in stored(site.spec) if one.number != 1]
    assert TrialState.FAILED not in {one.state for one in others}


def _hangs(site: Site, address: str) -> None:
    site.orders, site.may_fail = {"hold": [1]}, True
    site.resources = {"trial_timeout_s": 0.5}
    with held(site.folder):
        assert drive(site.spec, address) == "trials"
    assert site.attempts(1) == [FailureClass.TIMED_OUT]


def _cannot_import(site: Site, address: str) -> None:
    """A module is missing on every machine, until somebody installs it."""
    site.orders = {"import": [1]}
    (site.folder / "missing").touch()
    with pytest.raises(ServiceError, match="cannot import what a worker needs"):
        drive(site.spec, address)
    (site.folder / "missing").unlink()


def _another_version(site: Site, address: str) -> None:
    class Newer(Cluster):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._code = {**self._code, "archsearch": "9.9"}

    with pytest.raises(ServiceError, match=r"and this coordinator has archsearch 9\.9"):
        drive(site.spec, address, Newer)
    assert {one.state for one in stored(site.spec)} == {TrialState.PENDING}


def _struck(function: str, nth: int, blow: signal.Signals, site: Site, address: str) -> None:
    site.strike(Moment(function, True, nth), blow, address)


class Silent(PretendedCluster):
    """The first attempt falls silent; all it has to say comes once another has its trial."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._silent: TrialRequest | None = None
        self._late: list[Arrival] = []

    def submit(self, request: TrialRequest) -> None:
        if self._silent is None:
            self._silent = request
            self._late = [Up(request.token)]
            return
        super().submit(request)
        if request.number == self._silent.number:
            said = [Answer(self._silent.token, event) for event in run_stub(self._silent)]
            self._late += [Alive(self._silent.token), *said]
            self._late.append(Gone(self._silent.token, LOST, "cancelled"))

    def wait(self, timeout_s: float) -> list[Arrival]:
        late, self._late = self._late, []
        return late + super().wait(timeout_s)


def _late_answer(site: Site, _address: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LEASE_S", 0.2)
        assert drive(site.spec, None, Silent) == "trials"
    (lost,) = [one for one in stored(site.spec) if len(one.attempts) > 1]
    assert [attempt.failure for attempt in lost.attempts] == [LOST, None]


SUBMIT = "archsearch.cluster.cluster:Cluster.submit"
COMMIT = "archsearch.coordinator.desk:Desk.put_evaluation"
CASES: dict[str, Case] = {
    "a worker gets kill -9": partial(_ordered, "kill_once", [LOST, None]),
    "a worker gets kill -9 every time": partial(_ordered, "kill", [LOST, LOST, LOST]),
    "a worker gets SIGTERM": partial(_ordered, "terminate_once", [LOST, None]),
    "a worker's process ends": partial(_ordered, "leave_once", [LOST, None]),
    "Python's memory ends": partial(_ordered, "exhaust", [FailureClass.OUT_OF_MEMORY]),
    "a mixer raises": partial(_ordered, "raise", [FailureClass.PLUGIN_ERROR]),
    "NaN in one member": partial(_ordered, "one_diverges", [None]),
    "NaN in all members": partial(_ordered, "diverge", [FailureClass.DIVERGED]),
    "a trial hangs": _hangs,
    "workers lack a module": _cannot_import,
    "workers of another version": _another_version,
    "an answer after the lease": _late_answer,
    "kill -9 of the coordinator after submit": partial(_struck, SUBMIT, 3, signal.SIGKILL),
    "SIGTERM of the coordinator after submit": partial(_struck, SUBMIT, 3, signal.SIGTERM),
    "kill -9 of the coordinator after commit": partial(_struck, COMMIT, 2, signal.SIGKILL),
}
