"""How good the samplers and early stopping are, on a table where every answer is known.

    python benchmarks/search_quality.py [--seeds 20] [--jobs 2] [--rows random evolution ...]

Simulates studies over `benchmarks/data/search_table.json.gz` with the product's own proposals,
window of trials that are not told yet, hypervolume and rule of early stopping; only training is
looked up. Four trials run at once and take the seconds that they took. A row ends after 200
distinct architectures; `random` goes on to the end, because it may need that long. `optuna` is
TPE as Optuna has it by default; it too is spared duplicates, which it would train again by itself.

Reported for each row: the share of the true front's hypervolume after 25, 50, 100 and 200
architectures (median and quartiles over seeds, two-sided Mann-Whitney test against random), and the
training it takes to reach 95 % of it.
"""

import argparse
import heapq
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from scipy.stats import mannwhitneyu
from search_table import STUDY, Row, load

from archsearch.coordinator.book import Book, Entry
from archsearch.coordinator.loop import WINDOW
from archsearch.coordinator.nexts import Nexts
from archsearch.coordinator.peers import peers_of
from archsearch.device import device_model
from archsearch.front import hypervolume_from, reference_point
from archsearch.propose import sampler as propose
from archsearch.propose.corners import largest
from archsearch.propose.told import Told, told_of
from archsearch.records import TrialState
from archsearch.spec import EarlyStopping, StudySpec
from archsearch.stopping import decide, point_of, quality
from archsearch.study_file import load_study

HERE = Path(__file__).resolve().parent
BUDGETS = (25, 50, 100, 200)
SHARE = 0.95
EQUAL = 0.995
"""Share of a hypervolume that counts as equal to it."""
WORKERS = 4
PLAIN = "optuna"
ROWS = ("random", PLAIN, "tpe", "nsga2", "gp", "evolution", "auto")
STOPPED = ("random", "nsga2", "evolution")
"""Samplers that are also run with early stopping."""
_KEPT = {"mixer_rules": 0.0}


class PlainProposer(propose.Proposer):
    """Proposes as Optuna's default sampler does."""

    def make_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=seed)


@dataclass
class Run:
    """One simulated study: after each trial that ended, what was spent and what was found."""

    evaluated: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def at(self, budget: int) -> float:
        """Share of the hypervolume after so many architectures, or at the end if that is before."""
        return max(s for n, s in zip(self.evaluated, self.share, strict=True) if n <= budget)

    def spent_at(self, budget: int) -> float:
        """Seconds of training for so many architectures."""
        return max(s for n, s in zip(self.evaluated, self.seconds, strict=True) if n <= budget)

    def reached(self, column: Sequence[float]) -> float | None:
        """Where `column` stood when the share was reached."""
        pairs = zip(column, self.share, strict=True)
        return next((spent for spent, share in pairs if share >= SHARE), None)


class Simulation:
    """One study over the table."""

    def __init__(self, spec: StudySpec, rows: Mapping[str, Row], name: str) -> None:
        self.spec, self.rows = spec, rows
        sampler = {"name": name} if name == PLAIN else propose.resolve_sampler(spec)
        kind = PlainProposer if name == PLAIN else propose.Proposer
        self.proposer = kind(spec, sampler)
        self.book = Book()
        self.nexts = Nexts(spec, self.proposer, self.book)
        self.running: list[tuple[float, int]] = []
        self.waiting: list[Entry] = []
        self.now = 0.0
        most = largest(spec)
        self.reference = reference_point(spec, most, most)
        self.best = hypervolume_from(
            spec, self.reference, [{**r.metrics, "recall": r.recall or 0.0} for r in rows.values()]
        )

    def run(self) -> Run:
        run, spent, found, is_open = Run(), 0.0, list[dict[str, float]](), True
        evaluated = 0
        while is_open or self.running:
            is_open = self._fill() if is_open else False
            if not self.running:
                break
            self.now, number = heapq.heappop(self.running)
            entry = self.book[number]
            spent += self._end(entry)
            evaluated += 1
            if entry.feasible:
                found.append(entry.metrics)
            run.evaluated.append(evaluated)
            run.seconds.append(spent)
            run.share.append(hypervolume_from(self.spec, self.reference, found) / self.best)
        return run

    def _fill(self) -> bool:
        """Propose and start what there is room for; False if there is nothing left to propose."""
        lookahead = WINDOW * WORKERS
        budget = self.spec.search.trials
        while self.book.work < budget and self.book.may_propose(lookahead):
            for entry in self.book.entries[self.book.told : self.book.window_start(lookahead)]:
                self.proposer.tell(entry.number, self._told(entry))
                self.book.told = entry.number + 1
            proposal = self.nexts.next()
            if proposal is None:
                return False
            self._add(proposal)
            self._start()
        self._start()
        return self.book.work < budget

    def _add(self, proposal: propose.Proposal) -> None:
        row = self.rows[proposal.arch.arch_hash]
        leader = self.book.first_of(proposal.arch)
        entry = Entry(
            number=len(self.book),
            arch=proposal.arch,
            params=proposal.params,
            state=TrialState.PENDING,
            metrics=dict(row.metrics),
            duplicate_of=leader,
            told=self.book.told,
        )
        self.book.add(entry)
        if leader is None:
            self.waiting.append(entry)
        elif self.book[leader].state.is_final:
            self._copy(self.book[leader], entry)

    def _copy(self, leader: Entry, entry: Entry) -> None:
        entry.metrics, entry.state = leader.metrics, TrialState.DUPLICATE

    def _start(self) -> None:
        while self.waiting and len(self.running) < WORKERS:
            entry = self.waiting.pop(0)
            row = self._row(entry)
            last = self._last_rung(entry, row)
            rates, rungs = row.learning_rates, row.rungs[: last + 1]
            entry.rung_recalls = tuple(quality(rates, recalls) for recalls in rungs)
            heapq.heappush(self.running, (self.now + row.rung_seconds[last], entry.number))

    def _row(self, entry: Entry) -> Row:
        return self.rows[entry.arch.arch_hash]

    def _last_rung(self, entry: Entry, row: Row) -> int:
        """The rung after which a trial is stopped; the last if it is not."""
        peers, count = peers_of(self.spec, self.book, entry), len(row.rungs)
        for rung, points in peers.points.items() if peers is not None else ():
            recall = quality(row.learning_rates, row.rungs[rung])
            own = point_of(self.spec.objectives, recall, row.metrics)
            if not decide(peers.rule, rung, count, own, points).goes_on:
                return rung
        return count - 1

    def _told(self, entry: Entry) -> Told:
        first = entry if entry.duplicate_of is None else self.book[entry.duplicate_of]
        return told_of(self.spec, first.state, False, entry.metrics, _KEPT)

    def _end(self, entry: Entry) -> float:
        """End a trial and what waits for it; seconds of training that it took."""
        row = self._row(entry)
        entry.state = TrialState.STOPPED
        if len(entry.rung_recalls) == len(row.rungs):
            assert row.recall is not None
            entry.metrics = {**entry.metrics, "recall": row.recall}
            entry.state = TrialState.COMPLETE
        for duplicate in list(self.book.duplicates_of(entry.number)):
            self._copy(entry, duplicate)
        return row.rung_seconds[len(entry.rung_recalls) - 1]


def simulate(name: str, is_stopping: bool, trials: int, seed: int) -> Run:
    """One study."""
    spec = load_study(STUDY)
    search = spec.search.model_copy(
        update={
            "sampler": "auto" if name == PLAIN else name,
            "trials": trials,
            "early_stopping": EarlyStopping() if is_stopping else None,
        }
    )
    rows = {row.arch_hash: row for row in load()}
    return Simulation(spec.model_copy(update={"seed": seed, "search": search}), rows, name).run()


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def row_of(runs: Sequence[Run], against: Sequence[Run]) -> dict[str, Any]:
    """What is reported of one row."""
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        own, theirs = ([run.at(budget) for run in some] for some in (runs, against))
        p = float(mannwhitneyu(own, theirs).pvalue) if runs is not against else None
        found[f"share_at_{budget}"] = {"quartiles": quartiles(own), "p": p and float(f"{p:.2g}")}
    for name in ("evaluated", "seconds"):
        ends = [run.reached(getattr(run, name)) for run in runs]
        reached = [end for end in ends if end is not None]
        found[f"{name}_to_95"] = {
            "quartiles": quartiles(reached) if len(reached) == len(runs) else None,
            "reached": len(reached),
        }
    return found


def measure(names: Sequence[str], stopped: Sequence[str], seeds: int, jobs: int) -> dict[str, Any]:
    pairs = [(name, False) for name in names] + [(name, True) for name in stopped]
    rows: dict[str, Any] = {}
    grouped: dict[str, list[Run]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for name, is_stopping in pairs:
            label = f"{name}, stopping" if is_stopping else name
            trials = len(load()) if label == "random" else BUDGETS[-1]
            study = partial(simulate, name, is_stopping, trials)
            grouped[label] = list(pool.map(study, range(seeds)))
            rows[label] = row_of(grouped[label], grouped["random"])
            if is_stopping:
                rows[label]["saving"] = saving(grouped[name], grouped[label])
            print(line(label, rows[label]), flush=True)
    return rows


def saving(without: Sequence[Run], stopping: Sequence[Run]) -> dict[str, Any]:
    """Training without early stopping over training with it, seed by seed, where the latter has
    the hypervolume that the former had after 100 and 200 architectures."""
    found: dict[str, Any] = {}
    for budget in BUDGETS[2:]:
        factors, missed = [], 0
        for one, other in zip(without, stopping, strict=True):
            spent = one.spent_at(budget)
            ends = [
                seconds
                for seconds, share in zip(other.seconds, other.share, strict=True)
                if share >= EQUAL * one.at(budget)
            ]
            factors += [spent / ends[0]] if ends else []
            missed += not ends
        found[f"at_{budget}"] = {"quartiles": quartiles(factors), "missed": missed}
    return found


def line(label: str, row: Mapping[str, Any]) -> str:
    cells = [f"{label:20}"]
    for budget in BUDGETS:
        low, middle, high = row[f"share_at_{budget}"]["quartiles"]
        cells.append(f"{middle:.3f} ({low:.3f}-{high:.3f}) p {row[f'share_at_{budget}']['p']}")
    for name in ("evaluated", "seconds"):
        end = row[f"{name}_to_95"]
        cells.append(f"{end['quartiles']} {end['reached']}")
    return " | ".join([*cells, str(row.get("saving", ""))])


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--stopped", nargs="*", default=STOPPED, choices=ROWS)
    options = parser.parse_args()
    result = {
        "benchmark": "search_quality",
        "rows": measure(options.rows, options.stopped, options.seeds, options.jobs),
        "seeds": options.seeds,
        "workers": WORKERS,
        "device": device_model("cpu"),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("archsearch", "optuna", "torch")},
        },
        "commit": commit(),
    }
    if tuple(options.rows) == ROWS:
        (HERE / "results" / "search_quality.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
