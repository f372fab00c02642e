"""A cluster in this process that answers as the real one does, without Ray and at once.

Every attempt is a generator that `wait` moves on by one event, which travels as JSON. What a trial
does to its process, such as being killed, it would do to the coordinator's.
"""

import importlib
import time
from collections.abc import Iterator

from pydantic import ValidationError

from archsearch.cluster import Answer, Arrival, Gone, Up
from archsearch.errors import FailureClass
from archsearch.messages import Event, TrialRequest, read_event, read_request
from archsearch.spec import ResourcesSpec


class PretendedCluster:
    """Stands where `archsearch.cluster.Cluster` does."""

    is_exclusive = False

    def __init__(
        self, resources: ResourcesSpec, _address: str | None, trial_function: str, *_: object
    ) -> None:
        module, _, name = trial_function.partition(":")
        self.slots = resources.parallel or 1
        self.worker_seconds = 0.0
        """CPU time of this thread that real workers would have used."""
        self._function = getattr(importlib.import_module(module), name)
        self._attempts: dict[str, Iterator[Event]] = {}
        self._fresh: list[str] = []

    def submit(self, request: TrialRequest) -> None:
        text = request.model_dump_json()
        began = time.thread_time()
        self._attempts[request.token] = self._function(read_request(text))
        self.worker_seconds += time.thread_time() - began
        self._fresh.append(request.token)

    def wait(self, _timeout_s: float) -> list[Arrival]:
        fresh, self._fresh = self._fresh, []
        arrived: list[Arrival] = [Up(token) for token in fresh]
        return arrived + [self._next(token) for token in list(self._attempts) if token not in fresh]

    def cancel(self, token: str, lost: str = "") -> None:
        if self._attempts.pop(token, None) is not None:
            self._fresh = [one for one in self._fresh if one != token]

    def close(self) -> None:
        self._attempts.clear()

    def _next(self, token: str) -> Arrival:
        began = time.thread_time()
        event = next(self._attempts[token], None)
        text = event.model_dump_json() if event is not None else ""
        self.worker_seconds += time.thread_time() - began
        if event is None:
            del self._attempts[token]
            message = "the trial ended without a last event"
            return Gone(token, FailureClass.PLUGIN_ERROR, message)
        try:
            return Answer(token, read_event(text))
        except ValidationError as error:
            self.cancel(token)
            return Gone(token, FailureClass.PLUGIN_ERROR, str(error))
