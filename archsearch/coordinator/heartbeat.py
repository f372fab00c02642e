"""Signs of life of a coordinator, and a look at what it is asked, from a thread of its own.

Its lease is renewed every few seconds; requests and budgets are read every second. If the lease
turns out to be lost, the next `check` in the coordinator's own thread ends the run. A database that
cannot be reached for a moment is left to the coordinator's next write to report.
"""

import contextlib
import threading
import time

from archsearch.errors import ServiceError, StudyRefusedError
from archsearch.spec import SearchSpec
from archsearch.store.ledger import Ledger, Wishes

RENEW_S = 10.0
LOOK_S = 1.0


class Heartbeat:
    """Renews a lease until stopped, and counts the seconds that the study has run in all.

    Args:
        search: the budget until it is changed from outside.
    """

    def __init__(self, ledger: Ledger, seconds_before: float, search: SearchSpec) -> None:
        self.wishes = Wishes(None, search)
        """What is asked of this coordinator, as last read."""
        self._ledger = ledger
        self._seconds_before = seconds_before
        self._began = time.monotonic()
        self._stood_s = 0.0
        self._stop = threading.Event()
        self._lost: StudyRefusedError | None = None
        self._thread = threading.Thread(target=self._run, name="archsearch-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Renew no more. Returns once the thread has ended."""
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise StudyRefusedError if another coordinator has taken over."""
        if self._lost is not None:
            raise self._lost

    def stand(self, seconds: float) -> None:
        """Let time pass that does not count as time of the study."""
        began = time.monotonic()
        self._stop.wait(seconds)
        self._stood_s += time.monotonic() - began

    @property
    def seconds(self) -> float:
        """Wall clock of this run, without pauses."""
        return time.monotonic() - self._began - self._stood_s

    @property
    def seconds_run(self) -> float:
        """Wall clock of all runs of the study, without pauses."""
        return self._seconds_before + self.seconds

    def _run(self) -> None:
        renewed = time.monotonic()
        while not self._stop.wait(LOOK_S):
            try:
                with contextlib.suppress(ServiceError):
                    self.wishes = self._ledger.wishes()
                    if time.monotonic() - renewed >= RENEW_S:
                        self._ledger.renew(self.seconds_run)
                        renewed = time.monotonic()
            except StudyRefusedError as error:
                self._lost = error
                return
