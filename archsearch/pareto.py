"""Non-dominated ranks and exact hypervolume over plain numbers; every objective is minimised.

A point dominates another if it is nowhere worse and somewhere better. Equal points do not dominate
each other. Ranks follow the efficient non-dominated sort (Zhang et al., 2015: sort, then find each
point's front by binary search); the hypervolume is a sweep with a staircase in three dimensions and
slices of it in four (Fonseca et al., 2006, "An improved dimension-sweep algorithm"). Knows nothing
of studies, metrics or directions.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

Point = Sequence[float]

MAX_OBJECTIVES = 4


def dominates(left: Point, right: Point) -> bool:
    """True if `left` is at least as good everywhere and better somewhere."""
    return tuple(left) != tuple(right) and all(a <= b for a, b in zip(left, right, strict=True))


def ranks(points: Sequence[Point]) -> list[int]:
    """Return the front of each point: 0 if nothing dominates it, 1 if only points of front 0 do...

    Raises:
        ValueError: a value is not finite, or the points have different lengths.
    """
    _check(points)
    fronts: list[list[Point]] = []
    found = [0] * len(points)
    for index in sorted(range(len(points)), key=lambda i: tuple(points[i])):
        point = points[index]
        # A point dominated within front k is dominated within every front before k.
        low, high = 0, len(fronts)
        while low < high:
            middle = (low + high) // 2
            if any(dominates(other, point) for other in reversed(fronts[middle])):
                low = middle + 1
            else:
                high = middle
        if low == len(fronts):
            fronts.append([])
        fronts[low].append(point)
        found[index] = low
    return found


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Volume that is dominated by `points` and better than `reference`, for 1 to 4 objectives.

    Points that are not better than the reference everywhere add nothing.

    Raises:
        ValueError: no objective or more than four, different lengths, or a value is not finite.
    """
    if not 1 <= len(reference) <= MAX_OBJECTIVES:
        raise ValueError(
            f"hypervolume needs 1 to {MAX_OBJECTIVES} objectives; found {len(reference)}"
        )
    _check([*points, reference])
    inside = {
        tuple(point)
        for point in points
        if all(p < r for p, r in zip(point, reference, strict=True))
    }
    if len(reference) < 3:
        # Lower dimensions are a box of height 1 in the missing ones.
        missing = 3 - len(reference)
        return _volume(
            sorted((*point, *[0.0] * missing) for point in inside), (*reference, *[1.0] * missing)
        )
    if len(reference) == 3:
        return _volume(sorted(inside), tuple(reference))
    return _sliced(sorted(inside, key=lambda point: point[3]), tuple(reference))


def _check(points: Sequence[Point]) -> None:
    if len({len(point) for point in points}) > 1:
        raise ValueError("points have different numbers of objectives")
    for point in points:
        if not all(math.isfinite(value) for value in point):
            raise ValueError(f"point {tuple(point)} has a value that is not finite")


def _sliced(points: list[tuple[float, ...]], reference: tuple[float, ...]) -> float:
    """Four dimensions, points in order of the last: a sum of slices of equal 3-D volume."""
    total = 0.0
    for index, point in enumerate(points):
        end = points[index + 1][3] if index + 1 < len(points) else reference[3]
        if end > point[3]:
            below = sorted(other[:3] for other in points[: index + 1])
            total += (end - point[3]) * _volume(below, reference[:3])
    return total


def _volume(points: list[tuple[float, ...]], reference: tuple[float, ...]) -> float:
    """Three dimensions: sweep upwards in z over the staircase of the points seen so far."""
    stairs = _Staircase(reference[0], reference[1])
    total = 0.0
    by_height = sorted(points, key=lambda point: point[2])
    for index, (x, y, z) in enumerate(by_height):
        stairs.add(x, y)
        end = by_height[index + 1][2] if index + 1 < len(by_height) else reference[2]
        total += stairs.area * (end - z)
    return total


class _Staircase:
    """Non-dominated points of a plane (x rises, y falls) and the area they dominate."""

    def __init__(self, x_end: float, y_end: float) -> None:
        self._x: list[float] = []
        self._y: list[float] = []
        self._x_end = x_end
        self._y_end = y_end
        self.area = 0.0

    def add(self, x: float, y: float) -> None:
        """Insert a point inside the end corner; points it dominates go."""
        start = bisect_left(self._x, x)
        left_y = self._y[start - 1] if start else self._y_end
        if left_y <= y or (start < len(self._x) and self._x[start] == x and self._y[start] <= y):
            return
        stop, edge, top = start, x, left_y
        while stop < len(self._x) and self._y[stop] >= y:
            self.area += (self._x[stop] - edge) * (top - y)
            edge, top = self._x[stop], self._y[stop]
            stop += 1
        right_x = self._x[stop] if stop < len(self._x) else self._x_end
        self.area += (right_x - edge) * (top - y)
        self._x[start:stop] = [x]
        self._y[start:stop] = [y]
