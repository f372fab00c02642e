"""The benchmark of search quality: its simulation on a few trials, and what its figures show."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from search_quality import (
    RESULT,
    SHARE,
    SPACES,
    Case,
    cases,
    collect,
    report,
    saving,
    simulate,
    stopping_table,
    summary,
    table,
)
from search_table import load
from simulation import Run

from archsearch.spec import EarlyStopping, SearchSpec

PAGE = Path(__file__).parent.parent / "docs" / "search.md"
ROWS: dict[str, Any] = json.loads(RESULT.read_text())["rows"]
TINY = 14


def tiny(label: str, **changes: Any) -> Run:
    case = cases()[label]
    return Case(case.sampler, case.space, case.rule, changes.get("trials", TINY)).run(seed=0)


@pytest.mark.parametrize(
    "label", ["random", "optuna", "optuna TPESampler()", "tpe", "nsga2", "gp", "evolution"]
)
def test_every_sampler_runs(label: str) -> None:
    run = tiny(label)
    assert len(run.seconds) == len(run.share) == TINY
    assert run.seconds == sorted(run.seconds)
    assert run.share == sorted(run.share)
    assert 0 < run.share[-1] <= 1
    assert run.ask_s > 0


@pytest.mark.parametrize("space", SPACES)
def test_the_whole_space_is_the_whole_hypervolume_and_its_cost(space: str) -> None:
    run = Case("random", space, trials=len(load())).run(seed=0)
    assert run.share[-1] == pytest.approx(1, abs=1e-12)
    assert len(run.seconds) == (360 if space == "no attention" else 450)
    if len(run.seconds) == len(load()):  # every architecture once
        assert run.seconds[-1] == pytest.approx(sum(row.rung_seconds[-1] for row in load()))


def test_early_stopping_costs_less() -> None:
    whole, stopped = tiny("random", trials=60), tiny("random, reduction 3, grace 0.25", trials=60)
    assert len(whole.seconds) == len(stopped.seconds) == 60
    assert stopped.seconds[-1] < 0.8 * whole.seconds[-1]


def test_what_is_in_the_work_file_is_not_run_again(tmp_path: Path) -> None:
    case = cases()["random, no attention"]
    work, todo = tmp_path / "work", [("random, no attention", seed) for seed in case.seeds[:2]]
    first = collect(todo[:1], work, map)
    begun: list[tuple[str, int]] = []

    def mapped(_simulate: Any, some: list[tuple[str, int]]) -> Any:
        begun.extend(some)
        return map(simulate, some)

    again = collect(todo, work, mapped)
    assert begun == todo[1:]
    assert again["random, no attention"][0] == first["random, no attention"][0]


def test_shares_and_costs_are_read_off_a_run() -> None:
    run = Run([2.0, 5.0, 6.0], [0.5, SHARE, 1.0], ask_s=0.3)
    late = Run([2.0, 4.0, 8.0], [0.2, 0.3, 0.4], ask_s=0.3)
    assert (run.at(1), run.at(9), run.spent_at(2)) == (0.5, 1.0, 5.0)
    assert run.until(SHARE) == (2, 5.0)
    assert late.until(SHARE) is None
    row = summary({0: run, 1: run}, {0: run, 1: run})
    assert row["trainings_to_95"] == {"quartiles": [2, 2, 2], "reached": 2, "to_random": 1.0}
    assert row["ask_ms"] == 100
    assert summary({0: run, 1: late}, {0: run, 1: run})["seconds_to_95"]["reached"] == 1
    saved = saving({0: run, 1: run}, {0: late, 1: late})
    assert saved["cost_factor"] == [1.3333, 1.3333, 1.3333]
    assert saved["hypervolume_kept_at_worst"] == 2.5


def test_the_report_has_every_row() -> None:
    run = Run([1.0, 2.0], [0.9, 1.0], ask_s=0.1)
    runs = {label: dict.fromkeys(case.seeds, run) for label, case in cases().items()}
    assert [*report(runs)] == [*cases()] == [*ROWS]


def test_evolution_needs_a_third_of_what_random_search_needs() -> None:
    for label in ("evolution", "evolution, held out", *(f"evolution, {s}" for s in [*SPACES][1:])):
        row = ROWS[label]
        assert row["seconds_to_95"]["reached"] == row["seeds"]
        assert row["seconds_to_95"]["to_random"] <= 1 / 3
        assert all(row[f"share_at_{budget}"]["p"] < 0.01 for budget in (25, 50))


def test_auto_is_what_wins() -> None:
    ours = [
        name for name in get_args(SearchSpec.model_fields["sampler"].annotation) if name in ROWS
    ]
    best = min(ours, key=lambda name: ROWS[name]["seconds_to_95"]["to_random"])
    assert len(ours) == 5
    assert json.loads(RESULT.read_text())["auto"] == best


def test_the_default_rule_saves_half_at_the_same_hypervolume() -> None:
    rule = EarlyStopping()
    for sampler in ("random", "evolution"):
        row = ROWS[f"{sampler}, reduction {rule.reduction:g}, grace {rule.grace:g}"]
        assert row["beside_no_stopping"]["cost_factor"][1] >= 2
        assert row["beside_no_stopping"]["hypervolume_kept"][1] >= 0.995


def test_the_page_shows_the_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert table(ROWS) in text
    assert stopping_table(ROWS) in text
