"""Trials that were stopped early, wherever people look at a study: text, JSON, page, MLflow."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from tracking_cases import Case, publish

from archsearch.preview import preview_text
from archsearch.progress import status_line
from archsearch.records import StudyRecord, TrialRecord, TrialState, losses, training_saved
from archsearch.report import html_report
from archsearch.report.values import headline, page_values
from archsearch.snapshot import Snapshot
from archsearch.spec import EarlyStopping
from archsearch.store import Store
from archsearch.tables import (
    losses_text,
    status_text,
    status_values,
    trial_text,
    trial_values,
)

STOPPED = (2, 4, 6, 9)


def made(study: StudyRecord) -> list[TrialRecord]:
    """Twelve trials, of which four were stopped half way and the others are complete."""
    return [
        samples.sample_trial(
            study,
            one.number,
            one.arch,
            TrialState.STOPPED if one.number in STOPPED else TrialState.COMPLETE,
        )
        for one in samples.sample_trials(study, 12)
    ]


STUDY = samples.sample_study()
TRIALS = made(STUDY)
REASON = "recall 0.080 and its size took place 9 of 9 at rung 2 of 4, of which 3 go on"


def test_what_was_saved_is_a_share_of_all_training_done_here() -> None:
    assert training_saved(STUDY.spec, TRIALS) == pytest.approx(4 * 0.5 / 12)
    cached = [replace(one, from_cache=one.number == 0) for one in TRIALS]
    assert training_saved(STUDY.spec, cached) == pytest.approx(4 * 0.5 / 11)
    assert training_saved(STUDY.spec, []) == 0.0


def test_they_are_among_the_losses_and_not_on_the_front() -> None:
    assert [one.number for one, _ in losses(TRIALS)["stopped early"]] == list(STOPPED)
    assert losses_text(TRIALS) == f"4 stopped early, such as trial 2: {REASON}"


def test_status_counts_them_and_tells_of_the_last() -> None:
    values = status_values(STUDY, TRIALS)
    assert values["trials"]["stopped"] == 4
    assert [one["number"] for one in values["last_stopped"]] == [4, 6, 9]
    headers, row, blank, said, *last = status_text([values]).splitlines()
    place = headers.index("stopped")
    assert row[place : place + len("stopped")].strip() == "4"
    assert blank == ""
    assert said == "study 'sample': 4 stopped early, which saved 17% of the training; the last:"
    assert last == [f"  trial {number}: {REASON}" for number in (4, 6, 9)]
    none = [one for one in TRIALS if one.state is TrialState.COMPLETE]
    assert len(status_text([status_values(STUDY, none)]).splitlines()) == 2


def test_show_tells_why_and_how_far_it_came() -> None:
    shown = trial_text(STUDY, TRIALS[2], None)
    assert "trial 2 of 'sample': stopped, no place in the ranking" in shown
    assert f"stopped early: {REASON}" in shown
    assert "trained for 4 of 8 epochs" in shown
    rows = [line.split() for line in shown.splitlines()]
    first = rows.index(["rung", "epoch", "recall"]) + 1
    assert [row[:2] for row in rows[first : first + 3]] == [["1", "2"], ["2", "4"], []]
    values = trial_values(STUDY, TRIALS[2], None)
    assert (values["state"], values["message"], len(values["rungs"])) == ("stopped", REASON, 2)


def test_the_page_has_a_section_for_them() -> None:
    values = page_values(STUDY, TRIALS)
    (group,) = values["stopped"]
    assert (group["reason"], group["count"]) == ("stopped early", 4)
    assert [one["number"] for one in group["trials"]] == list(STOPPED)
    assert values["failures"] == []
    assert values["training_saved"] == pytest.approx(1 / 6)
    assert ("4", "stopped early") in headline(STUDY, TRIALS, {})
    assert REASON in html_report(STUDY, TRIALS)


def test_the_rule_is_told_with_the_study() -> None:
    search = STUDY.spec.search.model_copy(update={"early_stopping": EarlyStopping()})
    spec = STUDY.spec.model_copy(update={"search": search})
    told = "one in 3 goes on, from 25% of the training on"
    assert told in preview_text(spec) and told not in preview_text(STUDY.spec)
    assert ["early stopping", told] in page_values(replace(STUDY, spec=spec), TRIALS)["settings"]


def test_progress_counts_them() -> None:
    snapshot = Snapshot(
        study="s",
        trials=9,
        evaluated=5,
        complete=3,
        from_cache=0,
        failed=0,
        duplicate=0,
        infeasible=0,
        waiting=0,
        running=(),
        front_size=0,
        hypervolume=0.0,
        best=(),
        seconds=1.0,
        seconds_left=None,
        slots=1,
        stopped=2,
    )
    assert status_line(snapshot).startswith("5/9 trials; 0 running; 2 stopped early")


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    study = samples.sample_study(folder=tmp_path)
    with Store(study.spec.tracking.storage, create=True) as store:
        ledger = samples.begin(store, study)
        trials = made(study)[:4]
        samples.add(store, ledger, trials)
        yield Case(store, ledger, study, trials, study.spec.tracking.mlflow)


# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow_has_a_run_with_the_reason_and_the_curve_so_far(case: Case) -> None:
    publish(case)
    runs = case.by_key()
    run = runs["2"]
    assert run.info.status == "KILLED"
    tags = run.data.tags
    assert (tags["state"], tags["stop_reason"], tags["front"]) == ("stopped", REASON, "false")
    assert REASON in tags["mlflow.note.content"]
    assert [point.step for point in case.history(run, "selection_recall/lr 0.01")] == [50, 100]
    assert "recall" not in run.data.metrics and "state_bytes" in run.data.metrics
    assert runs["0"].data.tags["stop_reason"] == "none"
    stored = case.store.trial(case.study.name, 2)
    assert stored.rungs == case.trials[2].rungs
