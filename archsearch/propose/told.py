"""What Optuna is told of a trial that ends, checked before it is said.

Optuna accepts infinities, takes a missing constraint for a kept one, and leaves a trial RUNNING for
ever if values of a wrong shape come with a state; so all of it is checked here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from optuna import Study
from optuna.storages import BaseStorage
from optuna.trial import Trial, TrialState

from archsearch.records import TrialState as OurState
from archsearch.spec import StudySpec

_STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "fail": TrialState.FAIL,
}


@dataclass(frozen=True)
class Told:
    """The end of a trial, as a sampler sees it."""

    state: Literal["complete", "pruned", "fail"]
    values: tuple[float, ...] | None = None
    """Metrics of the objectives, in order and as they are; only if complete."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    """All of the study's or none."""


def told_of(
    spec: StudySpec,
    state: OurState,
    failed: bool,
    metrics: Mapping[str, float],
    constraints: Mapping[str, float],
) -> Told:
    """What to tell of a final trial: infeasible and stopped ones are pruned, with constraints.

    Args:
        state: of the trial, or of the one that it duplicates.
        failed: it, or what it duplicates, ended without a result.
    """
    assert state.is_final
    if failed:
        return Told("fail")
    if state in (OurState.INFEASIBLE, OurState.STOPPED):
        return Told("pruned", constraints=constraints)
    values = tuple(metrics[objective.metric] for objective in spec.objectives)
    return Told("complete", values, constraints)


def tell(study: Study, storage: BaseStorage, study_id: int, number: int, told: Told) -> None:
    """End one RUNNING trial of an Optuna study.

    Any exception from Optuna is a fault that must end the coordinator: a trial that was not told
    stays RUNNING.
    """
    assert (told.values is not None) == (told.state == "complete")
    if told.values is not None:
        assert len(told.values) == len(study.directions)
        assert all(math.isfinite(value) for value in told.values), told.values
    assert all(math.isfinite(value) for value in told.constraints.values()), told.constraints
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
    trial = Trial(study, trial_id)
    known = storage.get_trial(trial_id).constraints  # of whoever was killed in the middle of this
    for key in told.constraints.keys() - known.keys():
        trial.set_constraint(key, told.constraints[key])
    study.tell(number, told.values, _STATES[told.state])
