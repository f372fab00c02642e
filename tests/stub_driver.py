"""A coordinator in a process of its own, to be killed: `python -m stub_driver FOLDER [ORDERS]`.

Prints one JSON line for every snapshot, and at the end one with the outcome.
"""

import json
import sys
from pathlib import Path

from stub_trials import FUNCTION, stub_study

from archsearch.coordinator import run_study
from archsearch.snapshot import Snapshot


class Printer:
    """An observer for whoever reads our output."""

    def on_event(self, snapshot: Snapshot) -> None:
        running = [[trial.number, trial.worker] for trial in snapshot.running]
        line = {"evaluated": snapshot.evaluated, "running": running, "note": snapshot.note}
        print(json.dumps(line), flush=True)


class StuckPublisher:
    """A publisher that never comes to an end, once the study is over."""

    def start(self) -> None:
        pass

    def notify(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        print(json.dumps({"stuck": timeout_s}), flush=True)
        sys.stdin.read()


def main(folder: str, orders: str = "{}", stuck: str = "") -> None:
    outcome = run_study(
        stub_study(Path(folder), orders=json.loads(orders)),
        (),
        Printer(),
        publisher=StuckPublisher() if stuck else None,
        trial_function=FUNCTION,
    )
    print(json.dumps({"reason": outcome.stop_reason, "message": outcome.message}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
