"""Running a study from its specification to its end: who does what, in which order.

Claim the study, take up what is stored, connect to Ray, loop, give the study back. Whatever goes
wrong on the way, the lease is given back and a local Ray is stopped.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from archsearch.cluster import RUN_TRIAL, Cluster
from archsearch.coordinator.borrowing import borrowed
from archsearch.coordinator.confirming import Confirming
from archsearch.coordinator.desk import Desk
from archsearch.coordinator.heartbeat import Heartbeat
from archsearch.coordinator.interrupts import Interrupts
from archsearch.coordinator.loop import WAIT_S, Loop
from archsearch.coordinator.nexts import Nexts
from archsearch.coordinator.repair import read_book, repair
from archsearch.coordinator.showing import Showing
from archsearch.errors import ArchsearchError
from archsearch.front import reference_point
from archsearch.messages import PluginFile
from archsearch.propose.corners import largest
from archsearch.propose.mirror import Mirror
from archsearch.propose.sampler import Proposer, resolve_sampler
from archsearch.records import STARTS, Request, TrialState
from archsearch.snapshot import INTERRUPTED, Observer, Publisher, Snapshot, StudyOutcome
from archsearch.space import Value
from archsearch.spec import StudySpec
from archsearch.store import Store
from archsearch.store.claim import claim
from archsearch.store.database import engine_options
from archsearch.store.ledger import Ledger

PUBLISH_S = 60.0
PUBLISH_INTERRUPTED_S = 5.0
_MESSAGES = {
    "trials": "all {trials} trials are done",
    "time": "the time is up; run it again with more (`search.time` or --time) to go on",
    "device time": "the device time is spent; archsearch budget {study} --device-time gives more",
    "failures": "{failures} failed trials end it; archsearch retry {study} evaluates them again, "
    "archsearch budget {study} --failures allows more",
    "space exhausted": "every architecture of the space that can be evaluated has been",
    "interrupted": "stopped; run the same command again to go on where it stopped",
    "stopped": "stopped by request; go on with: archsearch resume {study}",
}
_OVER = ("time", "device time")
"""Budgets after whose end the front is still confirmed."""
_PAUSED = "paused; go on with: archsearch resume {study}"


def run_study(
    spec: StudySpec,
    plugins: tuple[PluginFile, ...],
    observer: Observer,
    publisher: Publisher | None = None,
    address: str | None = None,
    trial_function: str = RUN_TRIAL,
) -> StudyOutcome:
    """Run a study until its budget is spent, or go on with it.

    Args:
        plugins: the study's one-off mixer files; already registered in this process.
        publisher: shows finished trials elsewhere; None if nobody does.
        address: of a Ray cluster, such as `auto`; None starts Ray on this machine.
        trial_function: `module:function` that workers run.

    Raises:
        StudyRefusedError: another coordinator holds the study, or it is another one of that name.
        ServiceError: the database or Ray cannot be reached or cannot do what is asked.
    """
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(spec.tracking.storage, create=True))
        ledger = claim(store, spec, plugins, _resolved(store, spec))
        study = store.study(spec.study)
        heartbeat = Heartbeat(ledger, study.seconds_run, spec.search)
        stack.enter_context(_held(ledger, heartbeat))
        url = spec.tracking.storage
        mirror = stack.enter_context(contextlib.closing(Mirror(spec, url, engine_options(url))))
        records = store.trials(spec.study)
        proposer = Proposer(spec, study.sampler)
        desk = Desk(spec, ledger, mirror, proposer, read_book(spec, records, proposer))
        repaired = _left_by(ledger) + repair(desk, records)
        interrupts = Interrupts()
        run = _Run(desk, plugins, heartbeat, _Listener(observer, interrupts), publisher)
        run.used_before_s = study.device_seconds
        run.starts = study.starts
        run.showing.reference = dict(study.reference)
        if repaired:
            run.showing.show(None, "; ".join(repaired))
        stack.enter_context(_published(publisher))
        stack.enter_context(interrupts)
        reason = run.drive(interrupts, address, trial_function, study.device_model)
        interrupts.wanted = True  # from here on, one more Ctrl-C ends the process
        return run.finish(reason, tuple(repaired))


def _resolved(store: Store, spec: StudySpec) -> dict[str, Any]:
    """What the settings of the search come to when a study begins; it keeps that from then on."""
    starts = [] if spec.study in store.studies() else borrowed(store, spec)
    return resolve_sampler(spec) | ({STARTS: starts} if starts else {})


@contextlib.contextmanager
def _held(ledger: Ledger, heartbeat: Heartbeat) -> Iterator[None]:
    """Keep the lease alive meanwhile; give it back if the run fails."""
    heartbeat.start()
    try:
        yield
    except BaseException as error:
        heartbeat.stop()
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        # The failure that is on its way up says more than that the lease could not be given back.
        with contextlib.suppress(ArchsearchError):
            ledger.release(reason, heartbeat.seconds_run)
        raise


@contextlib.contextmanager
def _published(publisher: Publisher | None) -> Iterator[None]:
    """Publish meanwhile; if the run fails, do not wait for the rest."""
    if publisher is not None:
        publisher.start()
    try:
        yield
    except BaseException:
        if publisher is not None:
            publisher.stop(0.0)
        raise


def _left_by(ledger: Ledger) -> list[str]:
    if ledger.taken_from is None:
        return []
    return [f"the study was held by {ledger.taken_from}, which is gone"]


class _Listener:
    """An observer whose output may break: its reader went away, or its terminal was closed.

    Then nobody sees the study any more, and it stops as after Ctrl-C.
    """

    def __init__(self, observer: Observer, interrupts: Interrupts) -> None:
        self._observer = observer
        self._interrupts = interrupts
        self._is_deaf = False

    def on_event(self, snapshot: Snapshot) -> None:
        if not self._is_deaf:
            try:
                self._observer.on_event(snapshot)
            except OSError:
                self._is_deaf = self._interrupts.wanted = True


class _Run:
    """One run of a study that is held."""

    def __init__(
        self,
        desk: Desk,
        plugins: tuple[PluginFile, ...],
        heartbeat: Heartbeat,
        observer: Observer,
        publisher: Publisher | None,
    ) -> None:
        self._desk = desk
        self._plugins = plugins
        self._heartbeat = heartbeat
        self._publisher = publisher
        self._is_paused = False
        self.used_before_s = 0.0
        self.starts: Sequence[Sequence[Mapping[str, Value]]] = ()
        self._loop: Loop | None = None
        self._confirming = Confirming(desk.spec, desk.book)
        self.showing = Showing(desk.spec, desk.book, heartbeat, observer)

    def drive(
        self,
        interrupts: Interrupts,
        address: str | None,
        trial_function: str,
        device_model: str | None,
    ) -> str:
        """Run trials until there is a reason to stop, and return it."""
        if not self._has_work:
            return "trials"
        spent = self._spent()
        if spent is not None and not self._may_confirm(spent):
            return spent
        resources = self._desk.spec.resources
        is_timed = bool(self._desk.spec.latencies)
        with contextlib.closing(Cluster(resources, address, trial_function, is_timed)) as cluster:
            interrupts.install()  # Ray puts its own handlers in place
            nexts = Nexts(self._desk.spec, self._desk.proposer, self._desk.book, self.starts)
            loop = Loop(
                self._desk,
                cluster,
                nexts,
                self._confirming,
                self._heartbeat,
                self._plugins,
                device_model,
                self._changed,
            )
            self._loop = loop
            if resources.parallel is not None and cluster.slots < resources.parallel:
                said = f"{resources.parallel} trials at once do not fit here; {cluster.slots} do"
                self.showing.show(loop, said)
            return self._turn(loop, interrupts)

    def finish(self, reason: str, repaired: tuple[str, ...]) -> StudyOutcome:
        """Leave everything as the next run, and everyone who looks, should find it."""
        ledger, study = self._desk.ledger, self._desk.spec.study
        self._desk.put_back("its study was stopped; it runs again with the next run")
        ledger.set_stop_reason(reason)
        if self._publisher is not None:
            hurry = reason in INTERRUPTED
            self._publisher.stop(PUBLISH_INTERRUPTED_S if hurry else PUBLISH_S)
        self._heartbeat.stop()
        ledger.release(reason, self._heartbeat.seconds_run)
        search = self._heartbeat.wishes.search
        facts = {"trials": search.trials, "failures": search.failures, "study": study}
        message = f"study '{study}': {_MESSAGES[reason].format(**facts)}"
        last = self.showing.show(None, message)
        return StudyOutcome(study, reason, message, last, repaired)

    @property
    def _has_work(self) -> bool:
        book = self._desk.book
        waits = any(entry.state is TrialState.PENDING for entry in book.entries)
        more = book.work < self._heartbeat.wishes.search.trials
        return waits or more or self._may_confirm(None)

    def _may_confirm(self, spent: str | None) -> bool:
        """True if members of the front are to be trained again, whatever trials are left."""
        if not self._heartbeat.wishes.search.confirm or spent == "failures":
            return False
        return bool(self._confirming.wanted())

    def _spent(self) -> str | None:
        """Which budget is spent, so that no trial may start any more."""
        search, used_s = self._heartbeat.wishes.search, self.used_before_s
        if self._loop is not None:
            used_s += self._loop.device_seconds
        if search.time_s is not None and self._heartbeat.seconds_run >= search.time_s:
            return "time"
        if search.device_time_s is not None and used_s >= search.device_time_s:
            return "device time"
        failed = self._desk.book.count(TrialState.FAILED)
        return "failures" if search.failures is not None and failed >= search.failures else None

    def _turn(self, loop: Loop, interrupts: Interrupts) -> str:
        while True:
            self._heartbeat.check()
            request = self._heartbeat.wishes.request
            if interrupts.wanted or request is Request.STOP:
                loop.cancel()
                return "interrupted" if interrupts.wanted else "stopped"
            self._note_pause(loop, request is Request.PAUSE)
            spent = self._spent()
            if spent is None and not self._is_paused:
                loop.fill()
            if not self._is_paused and (spent in _OVER if spent else loop.has_searched):
                loop.confirm()
            if loop.flights:
                loop.take()
            elif loop.is_done:
                return "space exhausted" if loop.is_exhausted else "trials"
            elif self._is_paused:
                self._heartbeat.stand(WAIT_S)
            elif spent is not None:
                return spent
            else:
                loop.take()  # nothing runs: there may be no machine at the moment
            self.showing.tick(loop)

    def _note_pause(self, loop: Loop, is_paused: bool) -> None:
        if is_paused is not self._is_paused:
            self._is_paused = is_paused
            study = self._desk.spec.study
            self.showing.show(loop, _PAUSED.format(study=study) if is_paused else "goes on")

    def _changed(self, note: str) -> None:
        self._fix_reference()
        if self._publisher is not None:
            self._publisher.notify()
        self.showing.show(self._loop, note)

    def _fix_reference(self) -> None:
        """The hypervolume's reference point is fixed by the first trial that completes."""
        if self.showing.reference:
            return
        entries = self._desk.book.entries
        first = next((one for one in entries if one.state is TrialState.COMPLETE), None)
        if first is not None:
            spec = self._desk.spec
            self.showing.reference = reference_point(spec, largest(spec), first.metrics)
            self._desk.ledger.set_reference(self.showing.reference)
