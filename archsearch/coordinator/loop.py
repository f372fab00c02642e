"""The loop of a running study: propose, submit, take what arrives, until the budget is spent.

Bounded waits everywhere; one thread; whatever it learns goes to the desk. An attempt is named by
its token: what carries the token of an attempt given up is kept as a late answer and not used.
"""

import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping

from archsearch.cluster import Alive, Answer, Arrival, Cluster, Gone, News, Returned, Up
from archsearch.coordinator.answers import objection
from archsearch.coordinator.book import Entry
from archsearch.coordinator.confirming import Confirming
from archsearch.coordinator.desk import Desk
from archsearch.coordinator.flights import Flight
from archsearch.coordinator.heartbeat import Heartbeat
from archsearch.coordinator.nexts import Nexts
from archsearch.coordinator.peers import peers_of
from archsearch.errors import FailureClass
from archsearch.measures import profile_spec
from archsearch.messages import (
    Checked,
    Evaluated,
    Failed,
    PluginFile,
    Profile,
    Profiled,
    Progress,
    Rung,
    Started,
    Stopped,
    TrialRequest,
)
from archsearch.records import TrialState
from archsearch.store.results import (
    KnownEvaluation,
    KnownProfile,
    find_evaluation,
    find_profile,
    kernels_passed,
    plain,
    put_profile,
    put_verdict,
)

WAIT_S = 0.5
LEASE_S = 120.0
"""How long a worker may show no sign of life before its attempt is given up. It shows one every
few seconds, whatever the trial does, unless its process is stopped or its machine is cut off."""
RENEW_S = 10.0
"""How often leases of attempts are renewed in the database."""
WINDOW = 2
"""Trials in the window of `book`, for each that can run. In a simulation with durations spread by
half (lognormal, sigma 0.5) workers were busy 98 % of the time with 4 at once, 95 % with 8; with a
window of one more than can run, 86 % and 71 %. A wider window makes proposals less informed."""


class Loop:
    """The moving part of a coordinator.

    Args:
        desk: the study's records.
        cluster: where trials run.
        nexts: what to propose.
        confirming: what to train again, once the search is over.
        heartbeat: knows the budget as it is now.
        device_model: device that the study's latencies belong to, if it is known yet.
        changed: called with a sentence, or an empty one, after everything that happens.
    """

    def __init__(
        self,
        desk: Desk,
        cluster: Cluster,
        nexts: Nexts,
        confirming: Confirming,
        heartbeat: Heartbeat,
        plugins: tuple[PluginFile, ...],
        device_model: str | None,
        changed: Callable[[str], None],
    ) -> None:
        self.desk = desk
        self.cluster = cluster
        self.flights: dict[str, Flight] = {}
        self.queue: deque[Entry] = deque(
            entry
            for entry in desk.book.entries
            if entry.is_work and entry.state is TrialState.PENDING
        )
        self.is_exhausted = False
        self._landed_s = 0.0
        self._renewed = time.monotonic()
        self._nexts = nexts
        self._confirming = confirming
        self._confirmations: deque[Entry] = deque()
        self._heartbeat = heartbeat
        self._plugins = plugins
        self._device_model = device_model
        self._changed = changed
        self._attempts: Counter[int] = Counter()
        self._lookahead = WINDOW * cluster.slots
        self._kernels_passed = kernels_passed(desk.ledger.database)
        self._profile = profile_spec(desk.spec, cluster.is_exclusive)

    @property
    def is_done(self) -> bool:
        """True if nothing runs or waits, and nothing more will be proposed."""
        return not self.flights and not self._confirmations and self.has_searched

    @property
    def has_searched(self) -> bool:
        """True if no trial waits or will be proposed; some may still run."""
        return not self.queue and not self._wants_more

    @property
    def _wants_more(self) -> bool:
        wanted = self._heartbeat.wishes.search.trials
        return not self.is_exhausted and self.desk.book.work < wanted

    @property
    def device_seconds(self) -> float:
        """What attempts have used since this run began."""
        up_s = sum(flight.seconds_up for flight in self.flights.values())
        return (self._landed_s + up_s) * self.desk.spec.resources.devices

    def fill(self) -> None:
        """Propose what may be proposed, submit what there is room for."""
        while self._wants_more and self.desk.book.may_propose(self._lookahead):
            self.desk.tell_sampler(self._lookahead)
            proposal = self._nexts.next()
            if proposal is None:
                self.is_exhausted = True
                break
            entry = self.desk.propose(proposal)
            if entry.is_work and entry.state is TrialState.PENDING:
                self.queue.append(entry)
            self._changed("")
            self.submit()
        self.submit()

    def submit(self) -> None:
        """Start waiting trials while there is room; answer those whose results are known."""
        while self.queue and len(self.flights) < self.cluster.slots:
            self._submit(self.queue.popleft())

    def confirm(self) -> None:
        """Once every trial has ended, train members of the front again while there is room."""
        if self._heartbeat.wishes.search.confirm == 0:
            return
        while len(self.flights) < self.cluster.slots:
            if not self._confirmations and not self.flights:
                self._confirmations.extend(self._confirming.wanted())
            if not self._confirmations:
                return
            self._submit_again(self._confirmations.popleft())

    def take(self) -> None:
        """Wait a moment for workers and write down what they say."""
        for arrival in self.cluster.wait(WAIT_S):
            self._take(arrival)
        for token, flight in list(self.flights.items()):
            limit = self.desk.spec.resources.trial_timeout_s
            if flight.is_overdue(limit):
                self.cluster.cancel(token)
                self._fail(token, FailureClass.TIMED_OUT, f"stopped after {limit:g} s")
            elif flight.is_silent(LEASE_S):
                said = f"its worker showed no sign of life for {LEASE_S:g} s"
                self.cluster.cancel(token, lost=said)
                self._fail(token, FailureClass.LOST, said)
        self._renew()

    def _renew(self) -> None:
        """Write down, every few seconds, which attempts live and what they have used."""
        if time.monotonic() - self._renewed < RENEW_S:
            return
        self._renewed = time.monotonic()
        up = {token: flight for token, flight in self.flights.items() if flight.up is not None}
        self.desk.ledger.renew_attempts(self._used(up), LEASE_S)

    def _used(self, flights: Mapping[str, Flight]) -> dict[str, float]:
        devices = self.desk.spec.resources.devices
        return {token: flight.seconds_up * devices for token, flight in flights.items()}

    def _land(self, token: str) -> Flight:
        """Take an attempt out of the air, and write down what it has used."""
        flight = self.flights.pop(token)
        self._landed_s += flight.seconds_up
        if flight.up is not None:
            self.desk.ledger.renew_attempts(self._used({token: flight}), 0.0)
        return flight

    def cancel(self) -> None:
        """Stop everything in flight; these trials stay pending."""
        for token in list(self.flights):
            self.cluster.cancel(token)
            flight = self._land(token)
            self.desk.ledger.fail_attempt(token, FailureClass.LOST, "the study was stopped")
            if not flight.confirms:
                self.queue.appendleft(flight.entry)

    def _request(self, entry: Entry) -> TrialRequest:
        spec = self.desk.spec
        return TrialRequest(
            study=spec.study,
            number=entry.number,
            token=uuid.uuid4().hex,
            arch=entry.arch,
            task=spec.task,
            train=spec.train,
            profile=self._profile,
            seed=spec.seed,
            device="cuda" if spec.resources.gpus > 0 else "cpu",
            plugins=self._plugins,
            checkpoints=self.desk.checkpoints(),
            execution=spec.resources.execution,
            threads=spec.resources.cpus,
            peers=peers_of(spec, self.desk.book, entry),
            kernels_passed=tuple(sorted(self._kernels_passed)),
        )

    def _submit(self, entry: Entry) -> None:
        request = self._request(entry)
        database = self.desk.ledger.database
        arch_hash = entry.arch.arch_hash
        evaluation = find_evaluation(database, arch_hash, request.recipe_hash)
        if evaluation is not None and self._device_model is not None:
            known = find_profile(database, arch_hash, self._device_model, request.profile_key)
            if known is not None:
                self.desk.complete(entry, evaluation, known, token=None, from_cache=True)
                self._changed("")
                return
        request = request.model_copy(update={"train_wanted": evaluation is None})
        self._launch(entry, request, evaluation)

    def _submit_again(self, entry: Entry) -> None:
        """Confirm a trial: from what is known, or by a worker."""
        seeds = self._heartbeat.wishes.search.confirm
        request = self._confirming.request(self._request(entry), entry, seeds)
        arch_hash = entry.arch.arch_hash
        known = find_evaluation(self.desk.ledger.database, arch_hash, request.recipe_hash)
        if known is not None:
            self._confirmed(entry, known, None)
        else:
            self._launch(entry, request, None)

    def _launch(
        self, entry: Entry, request: TrialRequest, evaluation: KnownEvaluation | None
    ) -> None:
        self._attempts[entry.number] += 1
        self.desk.ledger.start_attempt(entry.number, request.token)
        self.flights[request.token] = Flight(
            entry, self._attempts[entry.number], request, evaluation
        )
        self.cluster.submit(request)
        self._changed("")

    def _take(self, arrival: Arrival) -> None:
        if isinstance(arrival, News):
            self._changed(arrival.text)
            return
        flight = self.flights.get(arrival.token)
        if flight is None:
            if isinstance(arrival, Answer) and not isinstance(arrival.event, Progress):
                late = {k: v for k, v in plain(arrival.event).items() if k != "weights"}
                self.desk.ledger.note_late_answer(arrival.token, late)
            return
        flight.hear()
        if isinstance(arrival, Up):
            flight.up = flight.heard
        elif isinstance(arrival, Alive):
            pass
        elif isinstance(arrival, Gone):
            self._fail(arrival.token, arrival.failure, arrival.message, arrival.traceback)
        elif isinstance(arrival, Returned):
            self._take_back(arrival)
        else:
            self._hear(flight, arrival)

    def _hear(self, flight: Flight, answer: Answer) -> None:
        ledger, event = self.desk.ledger, answer.event
        if said := objection(flight, event):
            self.cluster.cancel(answer.token)
            message = f"the trial's report is no answer to what was asked: {said}"
            self._fail(answer.token, FailureClass.PLUGIN_ERROR, message)
            return
        if isinstance(event, Started):
            flight.started = event
            ledger.note_started(answer.token, event)
            self._note_device(flight, event)
        elif isinstance(event, Checked):
            with ledger.writing() as connection:
                put_verdict(connection, event)
            if event.ok:
                self._kernels_passed.add(event.key)
        elif isinstance(event, Rung):
            flight.rungs.append(event)
            if not flight.confirms:
                ledger.add_rung(answer.token, event)
        elif isinstance(event, Evaluated):
            flight.evaluation = self.desk.put_evaluation(event)
            if flight.confirms:
                self._land(answer.token)
                self._confirmed(flight.entry, flight.evaluation, answer.token)
        elif isinstance(event, Failed):
            self._fail(answer.token, event.failure, event.message, event.traceback)
            return
        elif isinstance(event, Stopped):
            self._stopped(flight, answer.token, event)
            return
        else:
            self._profiled(flight, answer.token, event)
        self._changed("")

    def _note_device(self, flight: Flight, event: Started) -> None:
        """Latencies compare on one device model only; the first one is the study's.

        If they count, the study keeps to it. What only trains may run anywhere.
        """
        ours, theirs = self._device_model, event.device_model
        is_timed = bool(self.desk.spec.latencies)
        if ours is None:
            self._device_model = theirs
            self.desk.ledger.set_device_model(theirs)
            if is_timed:
                self._changed(f"this study's latencies are those of {theirs}")
        elif theirs != ours and is_timed and not flight.confirms:
            self.cluster.refuse(
                flight.request.token,
                f"has another device ({theirs}) than the latencies of this study ({ours}), which "
                "compare on one model only: `resources.device` names it, or a study of another "
                "name begins anew",
            )
        elif theirs != ours:
            self._changed(f"{event.node} has another device ({theirs}) than this study ({ours})")

    def _profiled(self, flight: Flight, token: str, event: Profiled) -> None:
        self._land(token)
        assert flight.evaluation is not None
        profile: Profile = event.profile
        with self.desk.ledger.writing() as connection:
            row = put_profile(connection, profile, flight.request.profile_key)
        known = KnownProfile(row, profile)
        self.desk.complete(flight.entry, flight.evaluation, known, token, from_cache=False)

    def _stopped(self, flight: Flight, token: str, event: Stopped) -> None:
        self._land(token)
        self.desk.stop(flight.entry, flight.rungs, event.reason, token)
        self._changed(f"trial {flight.entry.number} was stopped early: {event.reason}")

    def _confirmed(self, entry: Entry, evaluation: KnownEvaluation, token: str | None) -> None:
        self.desk.confirm(entry, evaluation, token)
        fresh, searched = evaluation.evaluation.recall, entry.metrics["recall"]
        seeds = len(evaluation.evaluation.members)
        said = f"recall {fresh:.3f} over {seeds} fresh seeds, {searched:.3f} in the search"
        self._changed(f"trial {entry.number} is confirmed: {said}")

    def _take_back(self, returned: Returned) -> None:
        """An attempt that never began says nothing about its trial, which goes again."""
        flight = self._land(returned.token)
        entry = flight.entry
        self._attempts[entry.number] -= 1
        self.desk.ledger.fail_attempt(returned.token, FailureClass.LOST, returned.message)
        (self._confirmations if flight.confirms else self.queue).appendleft(entry)
        self._changed(f"trial {entry.number} goes again: {returned.message}")

    def _fail(self, token: str, failure: FailureClass, message: str, traceback: str = "") -> None:
        flight = self._land(token)
        entry = flight.entry
        if failure.is_retried and flight.attempt < self.desk.spec.resources.attempts:
            self.desk.ledger.fail_attempt(token, failure, message, traceback)
            (self._confirmations if flight.confirms else self.queue).appendleft(entry)
            self._changed(f"trial {entry.number} was lost and goes again: {message}")
            return
        if flight.confirms:
            self.desk.ledger.fail_attempt(token, failure, message, traceback)
            self._confirming.give_up(entry)
            self._changed(f"trial {entry.number} cannot be confirmed ({failure}): {message}")
            return
        self.desk.fail(entry, failure, message, traceback, token)
        self._changed(f"trial {entry.number} failed ({failure}): {message}")
