"""The rule of early stopping on points whose places can be seen by eye, and what always holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archsearch.pareto import ranks
from archsearch.spec import EarlyStopping, Objective
from archsearch.stopping import (
    decide,
    decision_rungs,
    place_of,
    point_of,
    quality,
    spread_order,
)

RULE = EarlyStopping()
RECALL = Objective(metric="recall", direction="maximize")
STATE = Objective(metric="state_bytes", direction="minimize", context=64)
DECODE = Objective(metric="decode_ms", direction="minimize", batch=1, context=64)
PREFILL = Objective(metric="prefill_ms", direction="minimize", batch=1, context=64)

COORDINATE = st.integers(0, 4).map(float)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE, COORDINATE), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("reduction", "grace", "rungs", "expected"),
    [
        (3, 0.25, 8, (1, 5)),
        (3, 0.25, 4, (0, 2)),
        (2, 0.25, 8, (1, 3)),
        (3, 0.0, 27, (0, 2, 8)),
        (3, 0.3, 10, (2, 8)),
        (3, 0.9, 4, ()),
        (3, 0.25, 1, ()),
    ],
)
def test_rungs_that_decide_lie_a_factor_apart(
    reduction: float, grace: float, rungs: int, expected: tuple[int, ...]
) -> None:
    rule = EarlyStopping(reduction=reduction, grace=grace)
    assert decision_rungs(rule, rungs) == expected


def test_quality_is_that_of_the_best_learning_rate_over_its_seeds() -> None:
    assert quality((1e-3, 1e-3, 1e-2, 1e-2), (0.9, 0.1, 0.6, 0.5)) == pytest.approx(0.55)


def test_a_point_has_no_latency_but_what_latency_grows_with() -> None:
    known = {"state_bytes": 1000.0, "parameters": 100.0, "flops_per_token": 10.0}
    assert point_of((RECALL, STATE, DECODE), 0.7, known) == (-0.7, 3.0)
    assert point_of((DECODE, RECALL, PREFILL), 0.7, known) == (-0.7, 3.0, 1.0)


def test_a_point_takes_no_state_and_no_direction_amiss() -> None:
    most = Objective(metric="parameters", direction="maximize")
    assert point_of((RECALL, STATE, most), 0.0, {"state_bytes": 0, "parameters": 100.0}) == (
        0.0,
        0.0,
        -2.0,
    )


def test_extremes_come_first_then_what_lies_furthest() -> None:
    line = [(0.0, 1.0), (0.1, 0.9), (0.5, 0.5), (0.9, 0.1), (1.0, 0.0)]
    order = spread_order(line)
    assert order[:3] == [0, 4, 2]
    assert sorted(order) == list(range(5))


def test_a_dominated_trial_is_stopped_and_told_why() -> None:
    peers = [(-0.9, 2.0), (-0.8, 1.0), (-0.5, 0.5)]
    decision = decide(RULE, 1, 8, (-0.4, 3.0), peers)
    assert not decision.goes_on
    assert decision.reason == (
        "recall 0.400 and its size took place 4 of 4 at rung 2 of 8, of which the best 2 go on"
    )


def test_the_smallest_state_goes_on_whatever_it_recalls() -> None:
    peers = [(-0.9, 2.0), (-0.8, 1.0), (-0.5, 0.5), (-0.4, 0.6)]
    assert decide(RULE, 1, 8, (0.0, 0.1), peers).goes_on


def test_nothing_is_stopped_in_its_grace_at_its_end_or_among_few() -> None:
    better = [(-1.0, 0.0)] * 9
    worst = (0.0, 9.0)
    assert not decide(RULE, 1, 8, worst, better).goes_on
    assert decide(RULE, 0, 8, worst, better).goes_on
    assert decide(RULE, 7, 8, worst, better).goes_on
    assert decide(RULE, 1, 8, worst, better[:2]).goes_on
    assert not decide(RULE, 1, 8, worst, better[:3]).goes_on


def test_of_equal_points_the_own_one_comes_first() -> None:
    assert place_of((0.5, 0.5), [(0.5, 0.5)] * 8) == 0


@given(POINTS)
def test_places_follow_ranks_and_are_those_of_a_whole_order(
    points: list[tuple[float, ...]],
) -> None:
    distinct = list(dict.fromkeys(points))
    places = [
        place_of(own, [*distinct[:index], *distinct[index + 1 :]])
        for index, own in enumerate(distinct)
    ]
    found = ranks(distinct)
    for index, place in enumerate(places):
        better = sum(rank < found[index] for rank in found)
        assert better <= place < better + found.count(found[index])


@given(POINTS, st.floats(1.5, 8))
def test_the_best_of_each_objective_always_goes_on(
    points: list[tuple[float, ...]], reduction: float
) -> None:
    """As long as as many go on as there are objectives."""
    rule = EarlyStopping(reduction=reduction, grace=0.0)
    if math.ceil(len(points) / reduction) < 3:
        return
    for axis in range(3):
        best = min(range(len(points)), key=lambda i: (points[i][axis], *points[i]))
        peers = [point for index, point in enumerate(points) if index != best]
        assert decide(rule, 0, 2, points[best], peers).goes_on


@given(st.lists(st.integers(0, 16), min_size=2, max_size=12), st.permutations(range(12)))
def test_the_order_of_peers_changes_nothing(line: list[int], order: list[int]) -> None:
    """On a front whose points are often equally far apart."""
    own, *peers = [(float(x), float(16 - x)) for x in line]
    shuffled = [peers[index] for index in order if index < len(peers)]
    assert place_of(own, peers) == place_of(own, shuffled)
