"""Signs of life of a coordinator: its lease is renewed from a thread of its own.

If the lease turns out to be lost, the next `check` in the coordinator's own thread ends the run. A
database that cannot be reached for a moment is left to the coordinator's next write to report.
"""

import contextlib
import threading
import time

from archsearch.errors import ServiceError, StudyRefusedError
from archsearch.store.ledger import Ledger

RENEW_S = 10.0


class Heartbeat:
    """Renews a lease until stopped, and counts the seconds that the study has run in all."""

    def __init__(self, ledger: Ledger, seconds_before: float) -> None:
        self._ledger = ledger
        self._seconds_before = seconds_before
        self._began = time.monotonic()
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

    @property
    def seconds(self) -> float:
        """Wall clock of this run."""
        return time.monotonic() - self._began

    @property
    def seconds_run(self) -> float:
        """Wall clock of all runs of the study."""
        return self._seconds_before + self.seconds

    def _run(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                with contextlib.suppress(ServiceError):
                    self._ledger.renew(self.seconds_run)
            except StudyRefusedError as error:
                self._lost = error
                return
