"""What a worker runs once it has greeted: the trial's events as JSON, and signs of life."""

import importlib
import queue
import threading
from collections.abc import Callable, Iterator

from archsearch.messages import Event, TrialRequest, read_request

RUN_TRIAL = "archsearch.trial:run_trial"
"""`module:function` of what a worker runs: TrialRequest -> iterator of events."""
BEAT_S = 5.0
"""How long a worker says nothing at most."""
ALIVE = '{"kind": "alive"}'


def events(function: str, request: str) -> Iterator[str]:
    """Run a trial and yield what it says.

    It runs in a thread, so that the worker can show that it lives while an event is long in coming.
    """
    said: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

    def play() -> None:
        try:
            for event in _load(function)(read_request(request)):
                said.put(event.model_dump_json())
            said.put(None)
        except BaseException as error:
            said.put(error)  # raised again where Ray sees it

    threading.Thread(target=play, name="archsearch-trial", daemon=True).start()
    while True:
        try:
            text = said.get(timeout=BEAT_S)
        except queue.Empty:
            text = ALIVE
        if text is None:
            return
        if isinstance(text, BaseException):
            raise text
        yield text


def _load(function: str) -> Callable[[TrialRequest], Iterator[Event]]:
    module, _, name = function.partition(":")
    loaded: Callable[[TrialRequest], Iterator[Event]] = getattr(
        importlib.import_module(module), name
    )
    return loaded
