"""Train every architecture of a closed space once and keep the results as one small table.

    nice -n 5 python benchmarks/search_table.py [--study studies/search_table.yaml]

The trials are the product's own (`archsearch.trial`), without the profile of latencies. Results are
appended to a work file as they come, and a second start goes on behind them, so that the script may
be stopped at any time; the table is written when the space is exhausted. `load` reads it.
"""

import argparse
import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archsearch.compose import Assignment
from archsearch.cost import known_metrics
from archsearch.measures import profile_spec
from archsearch.messages import Evaluated, Evaluation, Failed, TrialRequest
from archsearch.propose.corners import shuffled
from archsearch.spec import StudySpec
from archsearch.study_file import load_study
from archsearch.trial import run_trial

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "studies" / "search_table.yaml"
TABLE = HERE / "data" / "search_table.json.gz"
_DIGITS = 4


@dataclass(frozen=True)
class Row:
    """One trained architecture: its decisions, what it costs, and what it recalls when."""

    params: dict[str, Any]
    arch_hash: str
    summary: str
    metrics: dict[str, float]
    """Metrics that are known before training."""
    learning_rates: tuple[float, ...] = ()
    rungs: tuple[tuple[float, ...], ...] = ()
    """Recall of each member on the selection split, by rung."""
    rung_seconds: tuple[float, ...] = ()
    """Seconds of training until each rung."""
    report: tuple[float, ...] = ()
    """Recall of each member on the report split at the end."""
    recall: float | None = None
    """The trial's verdict; None if it failed."""
    failure: str | None = None


def request_of(spec: StudySpec, number: int, one: Assignment) -> TrialRequest:
    return TrialRequest(
        study=spec.study,
        number=number,
        token=f"table-{number}",
        arch=one.arch,
        task=spec.task,
        train=spec.train,
        profile=profile_spec(spec, exclusive=False),
        seed=spec.seed,
        device="cpu",
    )


def train(spec: StudySpec, number: int, one: Assignment) -> Row:
    """Run one trial up to its evaluation."""
    known = {
        "params": dict(one.params),
        "arch_hash": one.arch.arch_hash,
        "summary": one.arch.summary,
        "metrics": known_metrics(one.arch, spec),
    }
    for event in run_trial(request_of(spec, number, one)):
        if isinstance(event, Evaluated):
            return Row(**known, **_results(event.evaluation))
        if isinstance(event, Failed):
            return Row(**known, failure=f"{event.failure}: {event.message}")
    raise AssertionError("a trial ended without a verdict")


def _results(evaluation: Evaluation) -> dict[str, Any]:
    members = evaluation.members
    return {
        "learning_rates": [one.learning_rate for one in members],
        "rungs": [
            [round(recall, _DIGITS) for recall in rung.selection_recall]
            for rung in evaluation.rungs
        ],
        "rung_seconds": [round(rung.seconds, 2) for rung in evaluation.rungs],
        "report": [round(one.report_recall, _DIGITS) for one in members],
        "recall": round(evaluation.recall, _DIGITS),
    }


def load(path: Path = TABLE) -> list[Row]:
    """Read a table."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        plain = json.load(file)
    return [Row(**row) for row in plain["rows"]]


def export(spec: StudySpec, rows: list[dict[str, Any]], path: Path) -> None:
    """Write the table, rows by architecture hash, with nothing in it that depends on the day."""
    ordered = sorted(rows, key=lambda row: str(row["arch_hash"]))
    text = json.dumps({"study": spec.study, "identity": spec.identity, "rows": ordered})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    spec = load_study(options.study)
    work: Path = options.table.with_suffix(f".{spec.identity}.part")
    work.parent.mkdir(parents=True, exist_ok=True)
    lines = work.read_text().splitlines() if work.exists() else []
    rows = {row["arch_hash"]: row for row in map(json.loads, lines)}
    space = shuffled(spec)
    begun = time.perf_counter()
    with work.open("a") as file:
        for number, one in enumerate(space):
            if one.arch.arch_hash in rows:
                continue
            row = train(spec, number, one).__dict__
            rows[one.arch.arch_hash] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            spent = time.perf_counter() - begun
            print(f"{len(rows)}/{len(space)} {spent:.0f} s {row['recall']} {row['summary']}")
    export(spec, list(rows.values()), options.table)
    print(f"{options.table}: {len(rows)} architectures, {options.table.stat().st_size} bytes")


if __name__ == "__main__":
    main()
