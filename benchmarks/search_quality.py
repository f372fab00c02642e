"""How good the samplers and early stopping are, on a table where every answer is known.

    nice python benchmarks/search_quality.py [--jobs 1]

Simulates studies (`simulation.py`) over `benchmarks/data/search_table.json.gz`, 20 seeds a row.
Every study that ends is appended to a work file, and a second start goes on behind it, as long as
neither the samplers nor the simulation change. A row ends after 200 trainings, those beside the
first question after 100; `random` goes on through the whole space, because it may need that long,
and `gp` ends after 50 and has 10 seeds, because asking it takes long. `optuna` is Optuna's default
for several objectives (NSGA-II), `optuna TPESampler()` its TPE as it is by default, both called as
their users do; what they propose twice, they train twice.

Reported for each row: the share of the true front's hypervolume after 25, 50, 100 and 200
trainings, and after the seconds of training that `random` needed for as many (median and quartiles
over seeds, two-sided Mann-Whitney test against `random`); what it takes to reach 95 %, also beside
the median of `random`. Of early stopping: cost and hypervolume beside the same study without it.
`held out` are seeds that no decision about the samplers has looked at; the other spaces are a part
of the table, and the table with other objectives.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from scipy.stats import mannwhitneyu
from search_table import STUDY, TABLE, load
from simulation import WORKERS, Field, Plain, Run, Study

from archsearch.device import device_model
from archsearch.model_spec import ModelSpec, Slot
from archsearch.propose.sampler import resolve_sampler
from archsearch.spec import EarlyStopping, Objective, StudySpec
from archsearch.study_file import load_study

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "search_quality.json"
BUDGETS = (25, 50, 100, 200)
SHARE = 0.95
SEEDS, HELD_OUT = range(20), range(100, 110)
PLAIN: Mapping[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "optuna": lambda seed: optuna.samplers.NSGAIISampler(seed=seed),
    "optuna TPESampler()": lambda seed: optuna.samplers.TPESampler(seed=seed),
}
SAMPLERS = ("evolution", "tpe", "nsga2")
RULES = ((2.0, 0.125), (3.0, 0.25), (3.0, 0.125), (4.0, 0.25))


@dataclass(frozen=True)
class Case:
    """A row: who proposes, on which space, and which rule stops trials (reduction, grace)."""

    sampler: str
    space: str = "whole"
    rule: tuple[float, float] | None = None
    trials: int = BUDGETS[-1]
    seeds: range = SEEDS

    def run(self, seed: int) -> Run:
        """One study."""
        field = Field(self._spec(seed), {row.arch_hash: row for row in load()})
        if self.sampler in PLAIN:
            return Plain(field, PLAIN[self.sampler](seed)).run()
        return Study(field).run()

    def _spec(self, seed: int) -> StudySpec:
        spec = load_study(STUDY)
        rule = EarlyStopping(reduction=self.rule[0], grace=self.rule[1]) if self.rule else None
        search = spec.search.model_copy(
            update={
                "sampler": "auto" if self.sampler in PLAIN else self.sampler,
                "trials": self.trials,
                "early_stopping": rule,
            }
        )
        changes = {"seed": seed, "search": search, **SPACES[self.space](spec)}
        return spec.model_copy(update=changes)


def _without(model: ModelSpec, mixer: str) -> ModelSpec:
    """The space without one mixer."""
    layers = [
        Slot(options=tuple(option for option in slot.options if option.mixer != mixer))
        for slot in model.layer_slots
    ]
    return model.model_copy(update={"layers": tuple(layers)})


PARAMETERS = Objective(metric="parameters", direction="minimize")
SPACES: Mapping[str, Callable[[StudySpec], dict[str, Any]]] = {
    "whole": lambda _spec: {},
    "no attention": lambda spec: {"model": _without(spec.model, "attention")},
    "recall and parameters": lambda spec: {"objectives": (spec.objectives[0], PARAMETERS)},
}


def cases() -> dict[str, Case]:
    """Every row by its label."""
    whole = len(load())
    found = {"random": Case("random", trials=whole)}
    found |= {name: Case(name) for name in (*PLAIN, *SAMPLERS)}
    found["random, held out"] = Case("random", trials=whole, seeds=HELD_OUT)
    found["evolution, held out"] = Case("evolution", trials=100, seeds=HELD_OUT)
    for rule in RULES:
        found[f"random, {_named(rule)}"] = Case("random", rule=rule)
    for space in [*SPACES][1:]:
        found[f"random, {space}"] = Case("random", space, trials=whole)
        found[f"evolution, {space}"] = Case("evolution", space, trials=100)
    for rule in RULES[:2]:
        found[f"evolution, {_named(rule)}"] = Case("evolution", rule=rule, trials=100)
    found["gp"] = Case("gp", trials=50, seeds=SEEDS[:10])
    return found


def _named(rule: tuple[float, float]) -> str:
    return f"reduction {rule[0]:g}, grace {rule[1]:g}"


Runs = dict[int, Run]
"""By seed."""


Todo = tuple[str, int]
"""Label and seed."""


def simulate(todo: Todo) -> tuple[str, int, Run]:
    label, seed = todo
    return label, seed, cases()[label].run(seed)


def collect(wanted: Sequence[Todo], work: Path, mapped: Callable[..., Any]) -> dict[str, Runs]:
    """The runs of labels and seeds: those in the work file, and the others, which it then has.

    Args:
        mapped: `map`, or as it of a pool of processes.
    """
    runs: dict[str, Runs] = {label: {} for label, _seed in wanted}
    lines = work.read_text().splitlines() if work.exists() else []
    for label, seed, plain in map(json.loads, lines):
        runs.setdefault(label, {})[seed] = Run(**plain)
    todo = [(label, seed) for label, seed in wanted if seed not in runs[label]]
    with work.open("a") as file:
        for label, seed, run in mapped(simulate, todo):
            runs[label][seed] = run
            file.write(json.dumps([label, seed, asdict(run)]) + "\n")
            file.flush()
            print(f"{label}, seed {seed}: {run.until(SHARE)}", flush=True)
    return runs


def quartiles(values: Sequence[float]) -> list[float] | None:
    """None if some of them never came to be."""
    if any(value == float("inf") for value in values):
        return None
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def compared(own: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    p = 1.0 if own == theirs else float(mannwhitneyu(own, theirs).pvalue)
    return {"quartiles": quartiles(own), "p": float(f"{p:.2g}")}


def ends_of(runs: Runs, share: float = SHARE) -> tuple[list[float], list[float]]:
    """Trainings and seconds to a share, by run; infinite if it was not reached."""
    never = (float("inf"), float("inf"))
    found = [run.until(share) or never for run in runs.values()]
    return [float(number) for number, _seconds in found], [seconds for _number, seconds in found]


def summary(runs: Runs, random: Runs) -> dict[str, Any]:
    """What is reported of one row, beside `random` on the same space."""
    found: dict[str, Any] = {"seeds": len(runs)}
    for budget in BUDGETS:
        if min(len(run.seconds) for run in runs.values()) < budget:
            continue
        spent = statistics.median(run.spent_at(budget) for run in random.values())
        own, theirs = ([run.at(budget) for run in some.values()] for some in (runs, random))
        found[f"share_at_{budget}"] = compared(own, theirs)
        own, theirs = ([_within(one, spent) for one in some.values()] for some in (runs, random))
        found[f"share_at_{spent:.0f}_s"] = compared(own, theirs)
    for name, own, theirs in zip(
        ("trainings", "seconds"), ends_of(runs), ends_of(random), strict=True
    ):
        reached = [one for one in own if one != float("inf")]
        median = statistics.median(own) / statistics.median(theirs)
        found[f"{name}_to_95"] = {
            "quartiles": quartiles(own),
            "reached": len(reached),
            "to_random": round(median, 3) if median < float("inf") else None,
        }
    asks = [1000 * run.ask_s / len(run.seconds) for run in runs.values()]
    found["ask_ms"] = round(statistics.median(asks), 1)
    return found


def _within(run: Run, seconds: float) -> float:
    """Share when no more than this was spent."""
    pairs = zip(run.seconds, run.share, strict=True)
    return max((share for spent, share in pairs if spent <= seconds), default=0.0)


def saving(stopped: Runs, whole: Runs) -> dict[str, Any]:
    """Early stopping beside the same seeds without it, after as many trials."""
    pairs = [(run, whole[seed]) for seed, run in stopped.items()]
    trials = min(len(run.seconds) for pair in pairs for run in pair)
    factors = [other.spent_at(trials) / one.spent_at(trials) for one, other in pairs]
    kept = [one.at(trials) / other.at(trials) for one, other in pairs]
    return {
        "trials": trials,
        "cost_factor": quartiles(factors),
        "hypervolume_kept": quartiles(kept),
        "hypervolume_kept_at_worst": round(min(kept), 4),
    }


def report(runs: Mapping[str, Runs]) -> dict[str, Any]:
    """All rows."""
    rows: dict[str, Any] = {}
    for label, case in cases().items():
        own, base = runs[label], runs[_beside(case)]
        rows[label] = summary(own, base)
        if case.rule is not None:
            rows[label]["beside_no_stopping"] = saving(own, runs[case.sampler])
    return rows


def _beside(case: Case) -> str:
    """Label of the random search that a row is held against."""
    if case.seeds is HELD_OUT:
        return "random, held out"
    return "random" if case.space == "whole" else f"random, {case.space}"


def table(rows: Mapping[str, Any]) -> str:
    """Rows for people, in Markdown."""
    heads = ["", *(f"{budget} trainings" for budget in BUDGETS), "to 95 %", "ask, ms"]
    lines = [heads, ["---"] * len(heads)]
    for label, row in rows.items():
        shares = [row.get(f"share_at_{budget}", {}).get("quartiles") for budget in BUDGETS]
        cells = [
            "" if one is None else f"{one[1]:.3f} ({one[0]:.3f}-{one[2]:.3f})" for one in shares
        ]
        beside = row["seconds_to_95"]["to_random"]
        lines.append([label, *cells, f"{beside:.2f}", f"{row['ask_ms']:.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stopping_table(rows: Mapping[str, Any]) -> str:
    """What early stopping saves and keeps, in Markdown."""
    heads = ["", "cost without it / with it", "hypervolume kept", "at worst"]
    lines = [heads, ["---"] * len(heads)]
    for label, row in rows.items():
        if (own := row.get("beside_no_stopping")) is not None:
            low, middle, high = own["cost_factor"]
            kept = own["hypervolume_kept"]
            cells = [
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                f"{kept[1]:.4f} ({kept[0]:.4f}-{kept[2]:.4f})",
            ]
            lines.append([label, *cells, f"{own['hypervolume_kept_at_worst']:.3f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digest() -> str:
    """Of what decides the answers: samplers, rule of stopping, simulation, table."""
    package = HERE.parent / "archsearch"
    names = ("breeding", "evolution", "gain", "sampler", "surrogate")
    files = [*(package / "propose" / f"{name}.py" for name in names), package / "stopping.py"]
    files += [HERE / "simulation.py", TABLE, STUDY]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    wanted = [(label, seed) for label, case in cases().items() for seed in case.seeds]
    work = RESULT.with_suffix(f".{digest()}.part")
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = collect(wanted, work, pool.map)
    rows = report(runs)
    print(table(rows), stopping_table(rows), sep="\n\n")
    result = {
        "benchmark": "search_quality",
        "auto": resolve_sampler(load_study(STUDY))["name"],
        "rows": rows,
        "workers": WORKERS,
        "device": device_model("cpu"),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("archsearch", "optuna", "torch")},
        },
        "commit": commit(),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
