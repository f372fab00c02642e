"""A coordinator in a process of its own: `python -m stub_driver FOLDER ORDERS SETTINGS`.

Prints one JSON line for every snapshot, and at the end one with the outcome or the error. Settings,
as JSON: `stuck` (its publisher comes to no end), `address` of a cluster, and the `resources` and
the `search` of the study.
"""

import json
import sys
from pathlib import Path
from typing import Any

from stub_trials import FUNCTION, changed, stub_study

from archsearch.coordinator import run_study
from archsearch.errors import ArchsearchError
from archsearch.snapshot import Snapshot


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class Printer:
    """An observer for whoever reads our output."""

    def on_event(self, snapshot: Snapshot) -> None:
        running = [[trial.number, trial.worker] for trial in snapshot.running]
        say(
            evaluated=snapshot.evaluated,
            running=running,
            slots=snapshot.slots,
            note=snapshot.note,
        )


class StuckPublisher:
    """A publisher that never comes to an end, once the study is over."""

    def start(self) -> None:
        pass

    def notify(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        say(stuck=timeout_s)
        sys.stdin.read()


def main(folder: str, orders: str, settings: str) -> None:
    told = json.loads(settings)
    spec = stub_study(Path(folder), orders=json.loads(orders))
    spec = changed(spec, "resources", **told.get("resources", {}))
    spec = changed(spec, "search", **told.get("search", {}))
    publisher = StuckPublisher() if told.get("stuck") else None
    try:
        outcome = run_study(spec, (), Printer(), publisher, told.get("address"), FUNCTION)
    except ArchsearchError as error:
        say(error=str(error))
        raise
    say(reason=outcome.stop_reason, message=outcome.message)


if __name__ == "__main__":
    main(*sys.argv[1:])
