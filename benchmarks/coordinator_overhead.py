"""What the service itself costs: seconds a trial, with trials that do nothing.

    python benchmarks/coordinator_overhead.py [--trials 200] [--sampler tpe]

Runs a study of pretended trials through the real coordinator, on real Ray and SQLite: proposal,
gate, ledger, Optuna's view, task, stream of events, weights file, evaluation, profile. Training is
excluded because there is none; starting Ray and its workers is reported apart. Prints one line for
people, one of JSON for programs, and writes the latter to benchmarks/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))
os.environ["PYTHONPATH"] = str(TESTS)  # workers import the pretended trials from there

from stub_trials import FUNCTION, changed, stub_study  # noqa: E402

from archsearch.coordinator import run_study  # noqa: E402
from archsearch.device import device_model  # noqa: E402
from archsearch.model_spec import ModelSpec, Option, Slot  # noqa: E402
from archsearch.snapshot import Snapshot  # noqa: E402
from archsearch.spec import StudySpec  # noqa: E402

TARGET_S = 0.5


class Clock:
    """An observer that notes when each trial had ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_event(self, snapshot: Snapshot) -> None:
        self.ended_s += [snapshot.seconds] * (snapshot.evaluated - len(self.ended_s))


def study(folder: Path, sampler: str) -> StudySpec:
    """Three searched slots, some thousand architectures, nine to twelve decisions each."""
    window = Option(
        mixer="sliding_window", fields={"window": (4, 8, 16, 32, 64), "heads": (1, 2, 4)}
    )
    linear = Option(mixer="linear_attention", fields={"feature_dim": (8, 16, 24, 32)})
    conv = Option(mixer="base_conv", fields={"kernel": (2, 3, 4)})
    slot = Slot(options=(window, linear, conv))
    model = ModelSpec(width=(32, 64), layers=(slot, slot, slot))
    spec = stub_study(folder, "overhead").model_copy(update={"model": model, "limits": ()})
    return changed(changed(spec, "search", sampler=sampler), "resources", parallel=None)


def measure(trials: int, sampler: str) -> dict[str, Any]:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_study(
            changed(study(Path(folder), sampler), "search", trials=trials),
            (),
            clock,
            trial_function=FUNCTION,
        )
    assert outcome.last.complete == trials, outcome
    first, last = clock.ended_s[0], clock.ended_s[-1]
    return {
        "benchmark": "coordinator_overhead",
        "seconds_per_trial": round((last - first) / (trials - 1), 4),
        "target_s": TARGET_S,
        "startup_s": round(first, 2),
        "trials": trials,
        "duplicates": outcome.last.duplicate,
        "sampler": sampler,
        "storage": "sqlite",
        "device": device_model("cpu"),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("archsearch", "ray", "optuna", "sqlalchemy")},
        },
        "commit": commit(),
    }


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--sampler", default="tpe", choices=["tpe", "random", "nsga2", "gp"])
    options = parser.parse_args()
    result = measure(options.trials, options.sampler)
    verdict = "within" if result["seconds_per_trial"] < TARGET_S else "ABOVE"
    print(
        f"{result['seconds_per_trial']:.3f} s a trial over {result['trials']} trials "
        f"({verdict} {TARGET_S} s); first result after {result['startup_s']:.1f} s"
    )
    print(json.dumps(result))
    target = HERE / "results" / "coordinator_overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
