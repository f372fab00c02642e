"""The front of a study: who competes, in which order, and what its hypervolume means."""

import itertools
from dataclasses import replace

import pytest
from samples import sample_evaluation, sample_study, sample_trials

from archsearch.front import DECADES, confirmed, costs, hypervolume_of, ranked, reference_point
from archsearch.pareto import dominates
from archsearch.records import TrialState
from archsearch.spec import Limit, Objective
from archsearch.tables import front_text, front_values

STUDY = sample_study()
TRIALS = sample_trials(STUDY, 40)


def only(metric: str, direction: str = "minimize", reference: float | None = None) -> Objective:
    return Objective.model_validate(
        {"metric": metric, "direction": direction, "reference": reference}
    )


def test_only_complete_and_feasible_trials_compete() -> None:
    broken = [
        replace(trial, violations=("decode_ms is 3; the limit is 2",))
        if trial.number == 0
        else trial
        for trial in TRIALS
    ]
    expected = {
        trial.number for trial in TRIALS if trial.state is TrialState.COMPLETE and trial.number
    }
    assert {trial.number for trial, _rank in ranked(STUDY, broken)} == expected


def test_front_is_what_nothing_dominates() -> None:
    pairs = ranked(STUDY, TRIALS)
    points = {trial.number: costs(STUDY.spec, trial.metrics) for trial, _rank in pairs}
    for trial, rank in pairs:
        beaten = any(dominates(other, points[trial.number]) for other in points.values())
        assert (rank == 0) == (not beaten)
    assert {rank for _trial, rank in pairs} >= {0, 1}


def test_ranked_is_in_order_of_state() -> None:
    sizes = [trial.metrics["state_bytes"] for trial, _rank in ranked(STUDY, TRIALS)]
    assert sizes == sorted(sizes)


def test_hypervolume_only_grows_with_trials() -> None:
    volumes = [hypervolume_of(STUDY, TRIALS[:count]) for count in range(len(TRIALS) + 1)]
    assert volumes[0] == 0.0
    assert all(before <= after for before, after in itertools.pairwise(volumes))
    assert 0.0 < volumes[-1] < 1.0


def test_hypervolume_waits_for_its_reference() -> None:
    assert hypervolume_of(replace(STUDY, reference={}), TRIALS) == 0.0


def test_halving_the_state_counts_the_same_everywhere() -> None:
    spec = STUDY.spec.model_copy(update={"objectives": (only("state_bytes"),)})
    study = replace(STUDY, spec=spec, reference={"state_bytes": 2.0**20})
    one = next(trial for trial in TRIALS if trial.feasible)
    volumes = [
        hypervolume_of(study, [replace(one, metrics={"state_bytes": 2.0**power})])
        for power in (18, 17, 10, 9)
    ]
    assert volumes[1] - volumes[0] == pytest.approx(volumes[3] - volumes[2])
    assert volumes[1] - volumes[0] == pytest.approx(0.30103 / DECADES, rel=1e-5)


def test_worse_than_the_reference_counts_nothing() -> None:
    spec = STUDY.spec.model_copy(update={"objectives": (only("recall", "maximize"),)})
    study = replace(STUDY, spec=spec, reference={"recall": 0.5})
    one = next(trial for trial in TRIALS if trial.feasible)
    volumes = [
        hypervolume_of(study, [replace(one, metrics={"recall": recall})])
        for recall in (0.4, 0.5, 0.75, 1.0)
    ]
    assert volumes == [0.0, 0.0, 0.5, 1.0]


def test_reference_point_takes_the_first_source_it_has() -> None:
    objectives = (
        only("recall", "maximize"),
        only("state_bytes"),
        only("decode_ms"),
        only("parameters", reference=123.0),
    )
    update = {"objectives": objectives, "limits": (Limit(metric="state_bytes", maximum=100.0),)}
    first = {"recall": 0.3, "state_bytes": 10.0, "decode_ms": 2.0, "parameters": 5.0}
    largest = {"state_bytes": 1000.0, "parameters": 1000.0}
    limited = STUDY.spec.model_copy(update=update)
    point = {"recall": 0.0, "state_bytes": 200.0, "decode_ms": 4.0, "parameters": 123.0}
    assert reference_point(limited, largest, first) == point
    free = limited.model_copy(update={"limits": ()})
    assert reference_point(free, largest, first) == point | {"state_bytes": 2000.0}


def test_the_confirmed_front_goes_by_fresh_seeds_and_holds_no_other_trial() -> None:
    study = sample_study()
    trials = sample_trials(study, 40)
    on_front = [trial for trial, rank in ranked(study, trials) if rank == 0]
    assert confirmed(study, trials) == []
    lucky = on_front[-1]  # the largest state of the front: nothing beats its recall
    fresh = {trial.number: trial.metrics["recall"] for trial in on_front} | {lucky.number: 0.0}
    known = [
        replace(trial, confirmation=sample_evaluation(trial.arch, fresh[trial.number], 0.0))
        if trial.number in fresh
        else trial
        for trial in trials
    ]
    found = confirmed(study, known)
    assert {trial.number for trial in found} == {one.number for one in on_front if one != lucky}
    assert lucky.number not in {trial.number for trial in found}
    values = front_values(study, known)
    assert values["confirmed_front"] == [trial.number for trial in found]
    rows = {row["number"]: row["confirmed"] for row in values["front"]}
    assert rows[lucky.number] == {"recall": 0.0, "recall_spread": 0.0, "seeds": 4}
    text = front_text(study, known)
    assert "confirmed" in text.splitlines()[0]
    assert "confirmed" not in front_text(study, trials)
    assert text.endswith(", ".join(str(trial.number) for trial in found))
