"""What `make quickstart` promises: how long it takes, what its front shows, and that it repeats.

    python benchmarks/quickstart.py

Runs studies/quickstart.yaml twice through the command line, each time in an empty folder, and
compares the two fronts but for what a clock measured. Prints one line for people, one of JSON for
programs, and writes the latter to benchmarks/results/.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET_S = 180.0
COMMAND = [sys.executable, "-c", "from archsearch.cli import main; main()"]


def run() -> tuple[float, dict[str, Any]]:
    """Seconds of one run from an empty folder, and what `archsearch front --json` says then."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        study = str(ROOT / "studies" / "quickstart.yaml")
        subprocess.run([*COMMAND, "run", study], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
        front = subprocess.run(
            [*COMMAND, "front", "--json"], cwd=folder, check=True, capture_output=True, text=True
        )
    found: dict[str, Any] = json.loads(front.stdout)
    return seconds, found


def points(front: dict[str, Any]) -> list[tuple[float, float]]:
    """(state_bytes, recall) of the front, by state."""
    rows = [trial["metrics"] for trial in front["front"]]
    return sorted((row["state_bytes"], row["recall"]) for row in rows)


def main() -> None:
    (first_s, first), (second_s, second) = run(), run()
    curve = points(first)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    result = {
        "benchmark": "quickstart",
        "seconds": [round(first_s, 1), round(second_s, 1)],
        "target_s": TARGET_S,
        "front_state_bytes_and_recall": curve,
        "recall_rises_with_state": all(
            low[1] <= high[1] for low, high in itertools.pairwise(curve)
        ),
        "same_front_twice": curve == points(second),
        "device": first["device_model"],
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("archsearch", "torch", "ray", "optuna")},
        "commit": commit.stdout.strip(),
    }
    print(
        f"quickstart: {first_s:.0f} s and {second_s:.0f} s (target {TARGET_S:.0f} s); "
        f"{len(curve)} on the front, recall {curve[0][1]:.3f} to {curve[-1][1]:.3f}; "
        f"the same front twice: {result['same_front_twice']}"
    )
    print(json.dumps(result))
    path = ROOT / "benchmarks" / "results" / "quickstart.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
