"""Do a study's limits leave anything to search? Finds out before a trial is started.

A small space is walked whole. In a large one the choices are improved one at a time until the
limits are met or no change helps, and a sample is drawn beside. Parameters and state are sums over
the layers, so that the descent ends at the smallest architecture, or next to it.
Knows nothing of YAML.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from archsearch.arch import ArchSpec
from archsearch.compose import compose, count, draw, walk
from archsearch.cost import known_metrics, too_large, violations
from archsearch.errors import FOREIGN_FAULTS, ArchsearchError
from archsearch.space import Value
from archsearch.spec import MEASURED_AFTER_TRAINING, Limit, Metric, StudySpec

MAX_WALK = 5000
"""Largest space that is walked whole."""
MAX_DRAWS = 200


@dataclass(frozen=True)
class Finding:
    """Something that excludes every architecture. `metric` is None if no single limit does."""

    metric: Metric | None
    message: str


def excluded(spec: StudySpec) -> tuple[Finding, ...]:
    """Say why no architecture of the study can be tried; empty if one can."""
    judge = _Judge(spec)
    total = count(spec.model)
    walked = (one.arch for one in walk(spec.model))
    looked = 0
    for arch in walked if total <= MAX_WALK else _sample(spec, judge):
        if judge.accepts(arch):
            return ()
        looked += 1
    return judge.findings(f"{looked} of {total}" if total > MAX_WALK else f"all {looked}")


def _sample(spec: StudySpec, judge: "_Judge") -> Iterator[ArchSpec]:
    """The end of a descent, then draws."""
    yield _descend(spec, judge)
    rng = random.Random(spec.seed)
    for _ in range(MAX_DRAWS):
        yield draw(spec.model, rng).arch


def _descend(spec: StudySpec, judge: "_Judge") -> ArchSpec:
    """Change one choice at a time for the better, until the limits are met or nothing helps."""
    chosen: dict[str, Value] = {}
    asked: dict[str, tuple[Value, ...]] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        asked[name] = candidates
        return chosen.get(name, candidates[0])

    best = judge.excess(compose(spec.model, choose))
    improved = True
    while improved and best[0] > 0:
        improved = False
        for name, candidates in list(asked.items()):
            before = chosen.get(name, candidates[0])
            for value in candidates:
                chosen[name] = value
                excess = judge.excess(compose(spec.model, choose))
                if excess < best:
                    best, before, improved = excess, value, True
            chosen[name] = before
    return compose(spec.model, choose)


class _Judge:
    """Judges architectures and remembers the smallest value of every limited metric."""

    def __init__(self, spec: StudySpec) -> None:
        # Without objectives, so that a metric is taken where its limit is measured.
        self.spec = spec.model_copy(update={"objectives": ()})
        self.limits = tuple(
            limit for limit in spec.limits if limit.metric not in MEASURED_AFTER_TRAINING
        )
        self.smallest: dict[Metric, float] = {}
        self.reason = ""

    def accepts(self, arch: ArchSpec) -> bool:
        if self.limits and self.excess(arch)[0] > 0:
            return False
        try:
            reasons = violations(arch, self.spec) or self._too_large(arch)
        except FOREIGN_FAULTS as error:  # a plugin's own code may raise anything
            reasons = (_said(arch, error),)
        self.reason = self.reason or next(iter(reasons), "")
        return not reasons

    def _too_large(self, arch: ArchSpec) -> tuple[str, ...]:
        with contextlib.suppress(*FOREIGN_FAULTS):  # a trial of it will say what is wrong
            return too_large(known_metrics(arch, self.spec))
        return ()

    def excess(self, arch: ArchSpec) -> tuple[float, float]:
        """How far beyond the limits, and how large, both relative to the limits and summed."""
        try:
            known = known_metrics(arch, self.spec)
        except FOREIGN_FAULTS as error:  # likewise
            self.reason = self.reason or _said(arch, error)
            return (math.inf, math.inf)
        beyond = size = 0.0
        for limit in self.limits:
            value = known[limit.metric]
            self.smallest[limit.metric] = min(value, self.smallest.get(limit.metric, value))
            beyond += max(0.0, value - limit.maximum) / max(limit.maximum, 1.0)
            size += value / max(limit.maximum, 1.0)
        return (beyond, size)

    def findings(self, looked: str) -> tuple[Finding, ...]:
        if not self.smallest:
            said = f"no architecture can be built ({looked} looked at): {self.reason}"
            return (Finding(None, said),)
        broken = [limit for limit in self.limits if self.smallest[limit.metric] > limit.maximum]
        if broken:
            return tuple(
                Finding(
                    limit.metric,
                    f"excludes every architecture ({looked} looked at): found a limit of "
                    f"{limit.maximum:,.0f}{_place(limit)}, but the smallest has "
                    f"{self.smallest[limit.metric]:,.0f}",
                )
                for limit in broken
            )
        smallest = ", ".join(f"{metric} {value:,.0f}" for metric, value in self.smallest.items())
        said = f"no architecture is within all limits at once ({looked} looked at)"
        return (Finding(None, f"{said}; the smallest found of each: {smallest}"),)


def _said(arch: ArchSpec, error: BaseException) -> str:
    known = isinstance(error, ArchsearchError)
    return str(error) if known else f"{arch.summary} raises {error!r}"


def _place(limit: Limit) -> str:
    return f" at context {limit.context:,}" if limit.context else ""
