"""Faults of answers: each poison turns the honest events of a worker into something else."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from odd_payloads import Saying
from stub_trials import run_stub

from archsearch.messages import TrialRequest

FUNCTION = "faults_of_answers:run_poisoned"
Events = list[dict[str, Any]]


def _at(kind: str, *path: str | int, value: Any) -> Callable[[Events], Events]:
    """Put a value at a place in every event of a kind."""

    def poison(events: Events) -> Events:
        for event in events:
            if event["kind"] == kind:
                place: Any = event
                for step in path[:-1]:
                    place = place[step]
                place[path[-1]] = value
        return events

    return poison


def _without(kind: str, events: Events) -> Events:
    return [event for event in events if event["kind"] != kind]


def _twice(kind: str, events: Events) -> Events:
    return [one for event in events for one in [event] * (1 + (event["kind"] == kind))]


def _failing(message: str, events: Events) -> Events:
    failed = {"kind": "failed", "failure": "plugin_error", "message": message, "traceback": message}
    return [events[0], failed]


_RECALL = ("evaluated", "evaluation", "recall")
_LATENCY = ("profiled", "profile", "decode", 0, "median_ms")
POISONS: dict[str, Callable[[Events], Events]] = {
    "recall NaN": _at(*_RECALL, value=math.nan),
    "recall infinite": _at(*_RECALL, value=math.inf),
    "recall of 7": _at(*_RECALL, value=7.0),
    "recall a text": _at(*_RECALL, value="high"),
    "recall a list": _at(*_RECALL, value=[0.5]),
    "no recall": _at(*_RECALL, value=None),
    "a member's recall NaN": _at("rung", "selection_recall", 0, value=math.nan),
    "latency infinite": _at(*_LATENCY, value=math.inf),
    "latency of 1e308": _at(*_LATENCY, value=1e308),
    "latency below zero": _at(*_LATENCY, value=-1.0),
    "memory of 2**200": _at("profiled", "profile", "peak_memory_bytes", value=2**200),
    "a node with NUL": _at("started", "node", value="a\0b"),
    "a node of 10,000 letters": _at("started", "node", value="n" * 10_000),
    "a process 2**40": _at("started", "pid", value=2**40),
    "a field too many": _at("started", "more", value=1),
    "half a character": _at("started", "node", value="\ud800"),
    "another architecture": _at("evaluated", "evaluation", "arch_hash", value="0" * 16),
    "another recipe": _at("evaluated", "evaluation", "recipe_hash", value="0" * 16),
    "members that were not asked for": _at("evaluated", "evaluation", "members", value=[]),
    "weights that are no base64": _at("evaluated", "weights", value="!"),
    "two evaluations": partial(_twice, "evaluated"),
    "a profile without an evaluation": partial(_without, "evaluated"),
    "a profile of nothing": _at("profiled", "profile", "decode", value=[]),
    "a profile of another": _at("profiled", "profile", "arch_hash", value="0" * 16),
    "a rung twice": partial(_twice, "rung"),
    "a rung of the future": _at("rung", "rung", value=10**6),
    "a rung without members": _at("rung", "selection_recall", value=[]),
    "stopped without being judged": _at("evaluated", "kind", value="stopped"),
    "stopped at no rung": lambda events: [events[0], _stopped()],
    "an unknown class of failure": lambda events: [{**_failing("", events)[1], "failure": "bored"}],
    "a message with NUL": partial(_failing, "a\0b"),
    "a message of 10 MB": partial(_failing, "long" * 2_500_000),
    "no last word": lambda events: events[:1],
    "nothing": lambda _events: [],
}
"""Name -> what it makes of the events of a trial. Each of them fails its trial, and only that."""


def _stopped() -> dict[str, Any]:
    return {"kind": "stopped", "rung": 0, "reason": "as ordered"}


def run_poisoned(request: TrialRequest) -> Iterator[Any]:
    """The n-th trial that starts has the n-th poison; those after the last are honest."""
    names = list(POISONS)
    events = [json.loads(event.model_dump_json()) for event in run_stub(request)]
    folder = Path(json.loads(request.task.recipe)["folder"])
    started = len(list((folder / "traces").iterdir()))
    poisoned = POISONS[names[started - 1]](events) if started <= len(names) else events
    return (Saying(json.dumps(event)) for event in poisoned)
