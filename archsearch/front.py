"""What is on the front of a study: the one home of ranks and hypervolume for CLI, report, MLflow.

Only complete, feasible trials compete. For ranks every objective is turned into a cost (recall is
negated). For the hypervolume every cost is scaled so that 0 is the ideal and 1 the study's fixed
reference point: recall linearly from 1 down to its reference, everything else by its logarithm
relative to the reference (a factor of `DECADES` powers of ten below it is the ideal). So halving
the state counts the same wherever it happens, and the result lies between 0 and 1.
"""

import math
from collections.abc import Iterable, Mapping

from archsearch.pareto import hypervolume, ranks
from archsearch.records import StudyRecord, TrialRecord
from archsearch.spec import Objective, StudySpec

DECADES = 6
"""Powers of ten below the reference that count as the ideal on a logarithmic axis."""


def costs(spec: StudySpec, metrics: Mapping[str, float]) -> tuple[float, ...]:
    """Values of the study's objectives, in order, all to be minimised."""
    return tuple(
        -metrics[objective.metric]
        if objective.direction == "maximize"
        else metrics[objective.metric]
        for objective in spec.objectives
    )


def ranked(study: StudyRecord, trials: Iterable[TrialRecord]) -> list[tuple[TrialRecord, int]]:
    """Complete, feasible trials with their front (0 is the Pareto front), by state bytes.

    Studies that do not record state bytes are ordered by number. Ties go by number.
    """
    candidates = [trial for trial in trials if trial.feasible]
    found = ranks([costs(study.spec, trial.metrics) for trial in candidates])
    pairs = list(zip(candidates, found, strict=True))
    return sorted(pairs, key=lambda pair: (pair[0].metrics.get("state_bytes", 0), pair[0].number))


def confirmed(study: StudyRecord, trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The confirmed front, by state bytes: recall of fresh seeds where there are any, and they are.

    A trial that is on that front without fresh seeds of its own is left out.
    """
    candidates = [trial for trial, _rank in ranked(study, trials)]
    found = ranks([costs(study.spec, trial.believed) for trial in candidates])
    return [
        trial
        for trial, rank in zip(candidates, found, strict=True)
        if rank == 0 and trial.confirmation is not None
    ]


def hypervolume_of(study: StudyRecord, trials: Iterable[TrialRecord]) -> float:
    """Share of the box between ideal and reference point that the front dominates, 0 to 1.

    0.0 as long as the reference point is not fixed, that is, before the first complete trial.
    """
    return hypervolume_from(
        study.spec, study.reference, (trial.metrics for trial in trials if trial.feasible)
    )


def hypervolume_from(
    spec: StudySpec, reference: Mapping[str, float], metrics: Iterable[Mapping[str, float]]
) -> float:
    """As `hypervolume_of`, from the metrics of the complete, feasible trials alone."""
    if not reference:
        return 0.0
    points = [
        [_scaled(objective, row[objective.metric], reference) for objective in spec.objectives]
        for row in metrics
    ]
    return hypervolume(points, [1.0] * len(spec.objectives))


def _scaled(objective: Objective, value: float, reference: Mapping[str, float]) -> float:
    """Cost of one value: 0 at the ideal or beyond, 1 at the reference point, above 1 outside."""
    worst = reference[objective.metric]
    if objective.metric == "recall":
        best = 1.0 if objective.direction == "maximize" else 0.0
        return (value - best) / (worst - best) if worst != best else 1.0
    if value <= 0 or worst <= 0:
        return 0.0 if objective.direction == "minimize" else 1.0
    ratio = value / worst if objective.direction == "minimize" else worst / value
    return max(0.0, 1.0 + math.log10(ratio) / DECADES)


def reference_point(
    spec: StudySpec, largest: Mapping[str, float], first: Mapping[str, float]
) -> dict[str, float]:
    """Fix the hypervolume's reference point, by metric, once for the life of a study.

    In this order: what the study file gives; recall 0; twice the limit on the same metric; twice
    `largest`, the largest analytic value of the space; twice `first`, the first completed trial's
    value. Twice, so that the largest architecture of all still counts. Metrics to be maximised
    other than recall take half of `first`.
    """
    limits = {limit.metric: limit.maximum for limit in spec.limits}
    found: dict[str, float] = {}
    for objective in spec.objectives:
        metric = objective.metric
        if objective.reference is not None:
            found[metric] = objective.reference
        elif metric == "recall":
            found[metric] = 0.0 if objective.direction == "maximize" else 1.0
        elif objective.direction == "maximize":
            found[metric] = first[metric] / 2
        else:
            found[metric] = 2 * limits.get(metric, largest.get(metric, first[metric]))
    return found
