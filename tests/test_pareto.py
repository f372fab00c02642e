"""Ranks and hypervolume against definitions that are too slow to use."""

import itertools
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archsearch.pareto import dominates, hypervolume, ranks

# Small integers, so that ties and equal points are common and volumes are exact in floating point.
COORDINATE = st.integers(0, 5).map(float)


def point_sets(smallest: int = 1, largest: int = 4) -> st.SearchStrategy[list[tuple[float, ...]]]:
    return st.integers(smallest, largest).flatmap(
        lambda n: st.lists(st.tuples(*[COORDINATE] * n), max_size=12)
    )


def ranks_by_definition(points: list[tuple[float, ...]]) -> list[int]:
    """Peel off what nothing left dominates, again and again."""
    found = [-1] * len(points)
    for rank in range(len(points)):
        left = [i for i in range(len(points)) if found[i] < 0]
        for i in left:
            if not any(dominates(points[j], points[i]) for j in left):
                found[i] = -2
        found = [rank if value == -2 else value for value in found]
    return found


def volume_by_counting(points: list[tuple[float, ...]], side: int, objectives: int) -> float:
    """Count unit cells: a cell is dominated if a point is at or below its lower corner."""
    cells = itertools.product(range(side), repeat=objectives)
    return float(
        sum(
            any(all(p <= c for p, c in zip(point, cell, strict=True)) for point in points)
            for cell in cells
        )
    )


@given(point_sets())
def test_ranks_are_those_of_the_definition(points: list[tuple[float, ...]]) -> None:
    assert ranks(points) == ranks_by_definition(points)


@settings(deadline=None)
@given(st.integers(1, 4), st.data())
def test_hypervolume_is_the_count_of_dominated_cells(objectives: int, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.tuples(*[COORDINATE] * objectives), max_size=8))
    expected = volume_by_counting(points, 4, objectives)
    assert hypervolume(points, [4.0] * objectives) == expected


@given(point_sets(2, 4), st.randoms())
def test_order_of_points_does_not_matter(
    points: list[tuple[float, ...]], rng: random.Random
) -> None:
    order = list(range(len(points)))
    rng.shuffle(order)
    shuffled = ranks([points[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(points))] == ranks(points)


def test_equal_points_share_a_front() -> None:
    assert ranks([(1.0, 1.0), (1.0, 1.0), (2.0, 2.0)]) == [0, 0, 1]


def test_no_points() -> None:
    assert ranks([]) == []
    assert hypervolume([], [1.0, 1.0]) == 0.0


def test_a_point_on_the_reference_adds_nothing() -> None:
    assert hypervolume([(0.0, 1.0)], [1.0, 1.0]) == 0.0


def test_hypervolume_of_a_sphere_octant_in_four_dimensions() -> None:
    """The boxes under points of the unit sphere fill the ball's octant from within."""
    rng = random.Random(0)
    points = []
    for _ in range(400):
        normal = [abs(rng.gauss(0, 1)) for _ in range(4)]
        length = math.sqrt(sum(x * x for x in normal))
        points.append(tuple(1 - x / length for x in normal))
    # The octant of the 4-ball has volume pi^2 / 32; the corners between 400 points miss a quarter.
    full = math.pi**2 / 32
    assert 0.7 * full < hypervolume(points, [1.0] * 4) < full


@pytest.mark.parametrize(
    ("points", "reference"),
    [
        ([(1.0, math.nan)], [2.0, 2.0]),
        ([(1.0, math.inf)], [2.0, 2.0]),
        ([(1.0, 1.0), (1.0, 1.0, 1.0)], [2.0, 2.0]),
        ([], []),
        ([], [1.0] * 5),
    ],
)
def test_what_cannot_be_compared_is_refused(
    points: list[tuple[float, ...]], reference: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"finite|objectives"):
        hypervolume(points, reference)


def test_a_large_study_is_ranked_in_a_moment() -> None:
    rng = random.Random(1)
    points = [(rng.random(), rng.random(), rng.random()) for _ in range(2000)]
    began = time.process_time()
    ranks(points)
    hypervolume([point for point in points if point[0] < 0.1], [1.0] * 3)
    # Measured at 0.3 s; a quadratic sweep in Python takes several seconds.
    assert time.process_time() - began < 3.0
