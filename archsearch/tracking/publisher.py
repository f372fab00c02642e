"""Keeping MLflow up to date: in a thread beside a running study, or all at once.

The store's outbox says what is missing. An outage (server down, wrong address, disk full) is said
once, in one line; the thread tries again with longer and longer pauses and publishes everything
later. Nothing that goes wrong here reaches the study.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING

from archsearch.errors import ServiceError
from archsearch.records import TrialRecord
from archsearch.store import Store

if TYPE_CHECKING:
    from archsearch.tracking.view import View

REFRESH_S = 5.0
"""Least time between two refreshes of ranks and summary while a study runs."""
REFRESH_SHARE = 0.05
"""Largest share of the time that refreshing may take; trials are being timed on this machine."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes one study's finished trials from a thread of its own.

    Args:
        store_url: the database; the thread reads it and marks what it has published.
        study: name of a stored study.
        mlflow_uri: MLflow tracking URI.
    """

    def __init__(self, store_url: str, study: str, mlflow_uri: str) -> None:
        self._store_url = store_url
        self._study = study
        self._uri = mlflow_uri
        self._thread = threading.Thread(target=self._work, name="mlflow-publisher", daemon=True)
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._asked = 0  # changes announced
        self._done = 0  # changes that MLflow shows, ranks and summary included
        self._hurried = 0  # changes that somebody waits for
        self._stopping = False
        # All below belongs to the thread.
        self._seen = 0  # changes announced when the thread last woke
        self._stopped = False
        self._view: View | None = None
        self._dirty = True
        self._next_refresh = 0.0
        self._down = False

    def start(self) -> None:
        """Begin to publish. The study must be stored already. Raises ServiceError if it is not."""
        self._store = Store(self._store_url)
        self._thread.start()
        self.notify()

    def notify(self) -> None:
        """Say that something changed; returns at once."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow shows everything stored so far; False if the time ran out."""
        with self._changed:
            self._asked += 1
            target = self._hurried = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= target, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Publish what is left, for at most `timeout_s` seconds, and end the thread.

        What could not be published stays in the outbox; a warning says how to publish it later.
        """
        with self._changed:
            self._asked += 1
            self._hurried = self._asked
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            complete = self._done >= self._hurried
        if not complete:
            _log.warning(
                "MLflow at %s does not show all of study '%s'; publish the rest with: "
                "archsearch sync %s",
                self._uri,
                self._study,
                self._study,
            )

    def _work(self) -> None:
        with self._store:
            pause_s = 0.0
            while not self._stopped:
                asked, hurry = self._wait(pause_s)
                try:
                    refreshed = self._update(hurry)
                except Exception as error:
                    # Whatever MLflow raises, the study must not notice; the outbox keeps the rest.
                    self._view = None
                    self._say_down(error)
                    pause_s = min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
                else:
                    pause_s = 0.0
                    self._say_up()
                    if refreshed:
                        self._finish(asked)

    def _wait(self, pause_s: float) -> tuple[int, bool]:
        """Sleep until there is work; return (changes announced so far, whether somebody waits).

        In an outage only the end of the pause, or somebody who begins to wait, is a reason to try.
        """

        def work() -> bool:
            return self._hurried > self._seen or (not pause_s and self._asked > self._seen)

        longest_s = pause_s or None
        if self._dirty and not pause_s:
            longest_s = max(0.0, self._next_refresh - time.monotonic())
        with self._changed:
            self._changed.wait_for(work, longest_s)
            self._seen = self._asked
            self._stopped = self._stopping
            return self._asked, self._hurried > self._done

    def _update(self, hurry: bool) -> bool:
        """Publish what is finished; refresh ranks and summary if it is time. True if all shown."""
        store = self._store
        if self._view is None:
            self._view, trials = open_view(store, self._study, self._uri)
        else:
            trials = store.unpublished(self._study)
        for trial in trials:
            self._view.publish(trial)
            store.mark_published(self._study, [trial.number])
            self._dirty = True
        began = time.monotonic()
        if not self._dirty:
            return True
        if not hurry and began < self._next_refresh:
            return False
        refresh(self._view, store, self._study)
        took_s = time.monotonic() - began
        self._dirty = False
        self._next_refresh = time.monotonic() + max(REFRESH_S, took_s / REFRESH_SHARE)
        return True

    def _finish(self, asked: int) -> None:
        with self._changed:
            self._done = asked
            self._changed.notify_all()

    def _say_down(self, error: Exception) -> None:
        if not self._down:
            _log.warning(
                "%s. The study goes on; MLflow gets the rest when it answers",
                _trouble(self._uri, error),
            )
        self._down = True

    def _say_up(self) -> None:
        if self._down:
            _log.warning("MLflow at %s answers again", self._uri)
        self._down = False


def _trouble(uri: str, error: Exception) -> str:
    """One line on what is wrong with MLflow, with the usual remedy where there is one."""
    text = " ".join(str(error).split())
    if "Invalid Host header" in text:
        text = "it refuses this Host header; start it with --allowed-hosts naming this host"
    return f"MLflow at {uri} cannot be used: {text[:240] or type(error).__name__}"


def open_view(store: Store, study: str, uri: str) -> tuple["View", list[TrialRecord]]:
    """Connect to MLflow; return the study there, and the final trials that it does not show.

    mlflow is loaded here, not above, so that it neither delays the start of a study nor is loaded
    where nothing is published.
    """
    from archsearch.tracking.view import View, connect

    view = View(connect(uri), uri, store.study(study))
    waiting = {trial.number for trial in store.unpublished(study)}
    missing = [
        trial for trial in store.trials(study) if trial.number in waiting or view.lacks(trial)
    ]
    return view, missing


def refresh(view: "View", store: Store, study: str) -> None:
    """Bring ranks and summary up to date with the database."""
    trials = store.trials(study)
    view.refresh_ranks(trials)
    view.refresh_summary(store.study(study), trials)


def sync(store: Store, study: str, uri: str) -> int:
    """Rebuild a study in MLflow from the database. Doing it again changes nothing.

    Returns the number of finished trials. Raises ServiceError if MLflow cannot be used.
    """
    trials = [trial for trial in store.trials(study) if trial.state.is_final]
    try:
        view, _ = open_view(store, study, uri)
        view.remove_unknown(trials)
        for trial in trials:
            view.publish(trial)
        store.mark_published(study, [trial.number for trial in trials])
        refresh(view, store, study)
    except Exception as error:
        raise ServiceError(_trouble(uri, error)) from error
    return len(trials)


def check_mlflow(uri: str) -> str:
    """Ask MLflow's API a small question and say what it is. Makes no database file.

    Raises ServiceError if it cannot be used; a server whose `/health` is fine may still refuse.
    """
    from archsearch.tracking.view import connect, sqlite_file

    database = sqlite_file(uri)
    if database is not None and not database.exists():
        return f"{uri} does not exist yet; the first run makes it"
    try:
        count = len(connect(uri).search_experiments(max_results=1000))
    except Exception as error:
        raise ServiceError(_trouble(uri, error)) from error
    return f"{uri} answers; it has {count} experiments"


def summary_address(uri: str, study: str) -> str | None:
    """Path of the study's summary after the address of the user interface; None if it has none."""
    from archsearch.tracking.view import connect, sqlite_file, summary_path

    database = sqlite_file(uri)
    if database is not None and not database.exists():
        return None
    try:
        return summary_path(connect(uri), study)
    except Exception as error:
        raise ServiceError(_trouble(uri, error)) from error
