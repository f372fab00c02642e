"""Studies that stop trials early: the key in the file, what it changes, a real trial that stops."""

from pathlib import Path

import pytest
from test_trial import ARCH, TRAIN, events_of, request

from archsearch.errors import SpecError
from archsearch.members import members_of
from archsearch.messages import (
    Checked,
    Evaluated,
    Peers,
    Profiled,
    Rung,
    Started,
    Stopped,
    TrialRequest,
)
from archsearch.spec import EarlyStopping, Objective, StudySpec
from archsearch.study_file import load_study

STUDY = """
study: stops
model: {width: 32, layers: [base_conv, {sliding_window: {window: [8, 16]}}]}
task: {mqar: {recipe: tiny}}
"""
RECALL = Objective(metric="recall", direction="maximize")
STATE = Objective(metric="state_bytes", direction="minimize", context=16)
GOOD = ((-1.0, 0.0),) * 4


def study(folder: Path, more: str = "") -> StudySpec:
    path = folder / "study.yaml"
    path.write_text(STUDY + more, "utf-8")
    return load_study(path)


def held_against(points: tuple[tuple[float, ...], ...], rung: int = 0) -> TrialRequest:
    """A real trial of three rungs, and the points of its peers at one of them."""
    peers = Peers(
        rule=EarlyStopping(),
        objectives=(RECALL, STATE),
        known={"state_bytes": 1e6},
        points={rung: points},
    )
    return request(train=TRAIN.model_copy(update={"rungs": 3}), peers=peers)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", None),
        ("search: {early_stopping: none}", None),
        ("search: {early_stopping: asha}", EarlyStopping()),
        ("search: {early_stopping: {}}", EarlyStopping()),
        (
            "search: {early_stopping: {reduction: 2, grace: 0.4}}",
            EarlyStopping(reduction=2, grace=0.4),
        ),
    ],
)
def test_the_key_as_it_is_written(
    tmp_path: Path, written: str, expected: EarlyStopping | None
) -> None:
    assert study(tmp_path, written).search.early_stopping == expected


def test_a_study_that_stops_nothing_is_the_study_it_was(tmp_path: Path) -> None:
    plain = study(tmp_path)
    assert "early_stopping" not in plain.canonical_json
    assert plain.identity == study(tmp_path, "search: {early_stopping: none}").identity
    stops = study(tmp_path, "search: {early_stopping: asha}")
    assert stops.identity != plain.identity
    assert StudySpec.model_validate_json(stops.model_dump_json()) == stops


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("train: {rungs: 1}", "train.rungs 1, none of which lies between the grace"),
        (
            "objectives: {state_bytes: minimize}",
            "found early stopping without recall among the objectives",
        ),
    ],
)
def test_a_rule_that_could_stop_nothing_is_refused(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        study(tmp_path, f"search: {{early_stopping: asha}}\n{more}\n")
    (problem,) = caught.value.problems
    assert problem.path == "search.early_stopping"
    assert said in problem.message


def test_a_trial_is_stopped_by_its_own_worker() -> None:
    started, *_checks, rung, stopped = events_of(held_against(GOOD))
    assert isinstance(started, Started) and isinstance(rung, Rung)
    assert isinstance(stopped, Stopped)
    assert stopped.rung == rung.rung == 0
    assert "place 5 of 5 at rung 1 of 3, of which the best 2 go on" in stopped.reason


@pytest.mark.parametrize(
    "asked",
    [held_against(((-0.0, 9.0),) * 4), held_against(GOOD[:2]), held_against(GOOD, rung=1)],
    ids=["the best of its peers", "too few peers", "peers at a rung that decides nothing"],
)
def test_a_trial_that_is_not_beaten_trains_to_its_end(asked: TrialRequest) -> None:
    kinds = [type(event) for event in events_of(asked)]
    assert kinds == [Started, Checked, Checked, Rung, Rung, Rung, Evaluated, Profiled]


def test_peers_are_no_part_of_what_a_result_is_kept_under() -> None:
    asked = held_against(GOOD)
    alone = asked.model_copy(update={"peers": None})
    assert asked.recipe_hash == alone.recipe_hash
    assert asked.profile_key == alone.profile_key
    assert asked.arch == ARCH


def test_member_rates_are_those_of_the_population() -> None:
    rates = tuple(member.learning_rate for member in members_of(TRAIN))
    assert rates == TRAIN.member_rates
