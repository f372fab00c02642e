"""What a worker might answer that is no event: trials of a machine that is broken or hostile."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stub_trials import run_stub

from archsearch.messages import TrialRequest

FUNCTION = "odd_payloads:run_odd"


class Bomb:
    """Makes a file as soon as somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Saying:
    """Stands where an event should: a worker sends what its `model_dump_json` gives."""

    def __init__(self, payload: object) -> None:
        self._payload = payload

    def model_dump_json(self) -> object:
        return self._payload


def payloads(folder: Path) -> list[object]:
    """One for each trial."""
    bomb = pickle.dumps(Bomb(folder / "exploded"))
    return [
        bomb,
        bomb.decode("latin-1"),
        {"kind": "started"},
        17,
        "null",
        '{"kind": "profiled", "profile": {"__class__": "os.system"}}',
        '{"kind": "started", "node": "a", "pid": 1, "device_model": "b", "more": 1}',
        "[" * 100_000,
    ]


def run_odd(request: TrialRequest) -> Iterator[Any]:
    """Answer like any other worker, then with a payload."""
    folder = Path(json.loads(request.task.recipe)["folder"])
    yield next(run_stub(request))
    odd = payloads(folder)
    yield Saying(odd[request.number % len(odd)])
