"""Early stopping for several objectives: may a trial go on training after a rung, or is it stopped?

Asynchronous successive halving with the whole front in place of one score (MO-ASHA, Schmucker et
al., 2021, arXiv 2106.12639): among the trials that reached the same rung, those with the best
places go on, a share of 1 / reduction. Places are given by non-dominated rank and, within a rank,
by an epsilon net, which takes the extremes first and then whatever lies furthest from what was
taken. Trials are stopped, never paused: the peers of a trial are known before it starts.

A point is what is known of a trial at a rung: its quality there, and what its architecture alone
decides. Latency is in no point, so it stops nothing; where it is an objective, what it grows with
stands in for it. Points of different rungs are never compared. Pure functions: knows nothing of
studies under way, workers or the database.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from archsearch.pareto import Point, ranks
from archsearch.spec import EarlyStopping, Metric, Objective, StudySpec

QUALITY: Metric = "recall"
"""The metric that training changes, and that rungs measure."""

KNOWN_FOR: Mapping[Metric, Metric] = {
    "state_bytes": "state_bytes",
    "parameters": "parameters",
    "flops_per_token": "flops_per_token",
    "decode_ms": "state_bytes",
    "peak_memory_bytes": "state_bytes",
    "prefill_ms": "flops_per_token",
}
"""For every other metric, what the architecture alone says of it."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a trial at one rung, and a sentence that says why."""

    goes_on: bool
    reason: str


def decision_rungs(rule: EarlyStopping, rungs: int) -> tuple[int, ...]:
    """Rungs, counted from 0, after which trials may be stopped, of `rungs` evenly spaced ones.

    The first ends a share `grace` of the training, each later one `reduction` times as much: if
    every rung decided, hardly any trial would reach the end. After the last rung there is nothing
    left to save.
    """
    found: list[int] = []
    least = rule.grace * rungs
    for rung in range(rungs - 1):
        if rung + 1 >= least - 1e-9:
            found.append(rung)
            least = rule.reduction * (rung + 1)
    return tuple(found)


def why_never(spec: StudySpec) -> str:
    """Say why a study's rule could never stop a trial; an empty string if it can, or has none."""
    rule, rungs = spec.search.early_stopping, spec.train.rungs
    if rule is None:
        return ""
    if all(objective.metric != QUALITY for objective in spec.objectives):
        return (
            f"found early stopping without {QUALITY} among the objectives; rungs measure it alone"
        )
    if not decision_rungs(rule, rungs):
        return (
            f"found early stopping with train.rungs {rungs}, none of which lies between the grace "
            f"({rule.grace:g} of the training) and the end; expected more rungs, such as 8, or a "
            "smaller grace"
        )
    return ""


def quality(learning_rates: Sequence[float], recalls: Sequence[float]) -> float:
    """Mean recall over the seeds of the best learning rate, from one value for each member."""
    own: dict[float, list[float]] = {}
    for rate, recall in zip(learning_rates, recalls, strict=True):
        own.setdefault(rate, []).append(recall)
    return max(sum(values) / len(values) for values in own.values())


def point_of(
    objectives: Sequence[Objective], quality: float, known: Mapping[str, float]
) -> tuple[float, ...]:
    """What is known of a trial at a rung, to be minimised: first its quality, then the rest.

    Args:
        quality: recall at this rung.
        known: metrics that the architecture alone decides. They enter as logarithms, so that
            halving counts the same wherever it happens.
    """
    found: dict[str, float] = {}
    for objective in objectives:
        sign = 1 if objective.direction == "minimize" else -1
        if objective.metric == QUALITY:
            found[QUALITY] = sign * quality
        else:
            metric = KNOWN_FOR[objective.metric]
            found.setdefault(metric, sign * math.log10(max(known[metric], 1.0)))
    return (found.pop(QUALITY), *found.values())


def decide(
    rule: EarlyStopping, rung: int, rungs: int, own: Point, peers: Sequence[Point]
) -> Decision:
    """Decide whether a trial goes on after a rung.

    Args:
        rung: counted from 0, of `rungs`.
        peers: points of the feasible trials that reached this rung before, whether they were
            stopped there or went on.
    """
    if rung not in decision_rungs(rule, rungs):
        return Decision(True, f"no trial is stopped at rung {rung + 1} of {rungs}")
    if len(peers) < rule.reduction:
        reached = f"{len(peers)} earlier trials reached rung {rung + 1} of {rungs}"
        return Decision(True, f"only {reached}; trials are stopped from {rule.reduction:g} on")
    size = len(peers) + 1
    going_on = math.ceil(size / rule.reduction)
    place = place_of(own, peers)
    said = f"recall {abs(own[0]):.3f} and its size took place {place + 1} of {size} at rung "
    said += f"{rung + 1} of {rungs}, of which the best {going_on} go on"
    return Decision(place < going_on, said)


def place_of(own: Point, peers: Sequence[Point]) -> int:
    """Place of a point among its peers in any order, 0 the best; among equals it comes first."""
    points = [tuple(own), *sorted(tuple(peer) for peer in peers)]
    found = ranks(points)
    better = sum(rank < found[0] for rank in found)
    same = [point for point, rank in zip(points, found, strict=True) if rank == found[0]]
    return better + spread_order(_scaled(same, points)).index(0)


def _scaled(some: Sequence[Point], points: Sequence[Point]) -> list[tuple[float, ...]]:
    """Points with every objective scaled to 0 to 1 over all of `points`."""
    axes = [(min(values), max(values)) for values in zip(*points, strict=True)]
    return [
        tuple(
            (value - low) / (high - low) if high > low else 0.0
            for value, (low, high) in zip(point, axes, strict=True)
        )
        for point in some
    ]


def spread_order(points: Sequence[Point]) -> list[int]:
    """Indices in the order of an epsilon net; of equals, the earlier point first.

    The best of each objective, in their order, then always the point that is furthest from the
    nearest of those taken.
    """
    order: list[int] = []
    nearest = [math.inf] * len(points)

    def take(index: int) -> None:
        order.append(index)
        for other, point in enumerate(points):
            nearest[other] = min(nearest[other], math.dist(point, points[index]))
        nearest[index] = -1.0

    for axis in range(len(points[0])):
        best = min(range(len(points)), key=lambda index: (points[index][axis], *points[index]))
        if nearest[best] > 0:
            take(best)
    while len(order) < len(points):
        take(max(range(len(points)), key=lambda index: nearest[index]))
    return order
