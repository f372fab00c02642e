"""Evolution of architectures: children of the front, of which a surrogate picks the next to train.

Regularised evolution (Real et al., 2019, arXiv:1802.01548) for several objectives: parents are
the best of the latest trials by non-dominated rank and then by spread; children are parents with
two layers swapped, a mixer or a field changed, or two parents crossed layer by layer, and a few
architectures are drawn anew. What a child costs in state, parameters and FLOPs is known without
training it; the rest is predicted (`surrogate`). The child with the largest expected gain in
hypervolume is proposed (`gain`), so that what is known is used exactly and a gap in the front draws
children. A function of the seed and of what was told; knows neither Optuna nor the database.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from archsearch.arch import ArchSpec
from archsearch.compose import Assignment, draw
from archsearch.cost import known_metric
from archsearch.errors import FOREIGN_FAULTS
from archsearch.gate import is_excluded
from archsearch.pareto import ranks
from archsearch.propose.breeding import child_of
from archsearch.propose.gain import Axis, chance_below, expected_gain
from archsearch.propose.surrogate import Features, Surrogate, distances, features
from archsearch.propose.told import Told
from archsearch.space import Value
from archsearch.spec import MEASURED_AFTER_TRAINING, Objective, StudySpec
from archsearch.stopping import spread_order

STARTERS = 3
"""Trials with values before the surrogate is asked; until then, of some that are drawn, the one
furthest from all trials is proposed."""
_POPULATION = 64
"""Latest trials among which parents are chosen, beside the front."""
_TRAINED = 256
"""Trials that the surrogate learns from at most: the front, and the latest."""
_CHILDREN = 64
_DRAWN = 16
_TRIES = 4
"""Architectures looked at for each that is wanted; known and excluded ones do not count."""
_CROSSED = 0.3
"""Share of children that have two parents."""
_REMEMBERED = 4096
"""Architectures whose known metrics are kept, because children come again and again."""
_LEAST = 1e-9
"""Values below it, such as no state at all, count as it on a logarithmic axis."""
_MARGIN = math.log10(2)
"""Room beyond the worst cost seen on a logarithmic axis, so that the worst counts too."""


@dataclass(frozen=True)
class _Known:
    """What an architecture alone decides: objectives that need no training, and features."""

    metrics: Mapping[str, float]
    features: Features


@dataclass
class _Candidate:
    """An architecture that may be proposed."""

    one: Assignment
    known: _Known


@dataclass
class _Trial(_Candidate):
    """One that was proposed, and what became of it."""

    costs: tuple[float, ...] | None = None
    """All to be minimised; None until it is told with values."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    is_settled: bool = False

    @property
    def is_feasible(self) -> bool:
        return self.costs is not None and all(one <= 0 for one in self.constraints.values())

    @property
    def has_failed(self) -> bool:
        """True if it ended without values: it failed, was stopped, or can be held by no device."""
        return self.is_settled and self.costs is None


_UNKNOWN = _Known({}, {})
"""Of what is excluded or fails before it is trained."""


class Evolution:
    """What is known of one study's trials, and the next to propose."""

    def __init__(self, spec: StudySpec) -> None:
        self._spec = spec
        self._objectives = spec.objectives
        self._trials: list[_Trial] = []
        self._front: list[_Trial] = []
        self._first: dict[str, _Trial] = {}
        """By architecture: its first trial. Duplicates of it are the same trial."""
        self._seen: dict[str, _Known | None] = {}

    def add(self, arch: ArchSpec, params: Mapping[str, Value]) -> None:
        """Note the next trial, whoever proposed it."""
        trial = self._first.get(arch.arch_hash)
        if trial is None:
            known = self._look_at(arch)
            trial = _Trial(Assignment(arch, params), known or _UNKNOWN, is_settled=known is None)
            self._first[arch.arch_hash] = trial
        self._trials.append(trial)

    def tell(self, number: int, told: Told) -> None:
        """Note how a trial ended."""
        trial = self._trials[number]
        trial.is_settled = True
        trial.constraints = told.constraints
        if told.values is not None and trial.costs is None and trial.known is not _UNKNOWN:
            pairs = zip(self._objectives, told.values, strict=True)
            trial.costs = tuple(_cost(objective, value) for objective, value in pairs)
            if trial.is_feasible:
                self._extend_front(trial)

    def propose(self, seed: int) -> Mapping[str, Value]:
        """Decisions that lead to the next architecture."""
        rng = random.Random(seed)
        costed = sum(trial.costs is not None for trial in self._first.values())
        begins = costed < STARTERS
        pool = self._pool([] if begins else self._parents(), rng)
        if not pool:
            return draw(self._spec.model, rng).params
        merit = self._novelty(pool) if begins else self._merit(pool, seed)
        return pool[int(merit.argmax())].one.params

    def _look_at(self, arch: ArchSpec) -> _Known | None:
        """What is known of an architecture; None if it is excluded or a mixer fails."""
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        if arch.arch_hash not in self._seen:
            self._seen[arch.arch_hash] = self._new(arch)
        return self._seen[arch.arch_hash]

    def _new(self, arch: ArchSpec) -> _Known | None:
        if is_excluded(arch, self._spec):
            return None
        try:
            metrics: dict[str, float] = {
                one.metric: float(
                    known_metric(arch, self._spec, one.metric, self._spec.place_of(one)[1])
                )
                for one in self._objectives
                if one.metric not in MEASURED_AFTER_TRAINING
            }
        except FOREIGN_FAULTS:
            return None
        return _Known(metrics, features(arch, metrics))

    def _extend_front(self, trial: _Trial) -> None:
        """Keep the feasible trials that no other dominates."""
        assert trial.costs is not None
        kept = [*self._front, trial]
        places = ranks([one.costs for one in kept if one.costs is not None])
        self._front = [one for one, place in zip(kept, places, strict=True) if place == 0]

    def _pool(self, parents: Sequence[_Trial], rng: random.Random) -> list[_Candidate]:
        """Children of the best, and some architectures drawn anew; each feasible and new."""
        found: dict[str, _Candidate] = {}

        def child() -> Assignment:
            chosen = [parents[min(rng.randrange(len(parents)) for _ in range(3))]]
            if rng.random() < _CROSSED:
                chosen.append(rng.choice(parents))
            return child_of(self._spec.model, [one.one.params for one in chosen], rng)

        if parents:
            self._collect(child, _CHILDREN, found)
        self._collect(lambda: draw(self._spec.model, rng), _DRAWN, found)
        return list(found.values())

    def _collect(
        self, make: Callable[[], Assignment], wanted: int, found: dict[str, _Candidate]
    ) -> None:
        """Add up to so many architectures that are new and not excluded."""
        stop = len(found) + wanted
        for _ in range(_TRIES * wanted):
            if len(found) >= stop:
                break
            one = make()
            arch_hash = one.arch.arch_hash
            if arch_hash in self._first or arch_hash in found:
                continue
            known = self._look_at(one.arch)
            if known is not None:
                found[arch_hash] = _Candidate(one, known)

    def _parents(self) -> list[_Trial]:
        """The front and the latest trials, the best first: by rank, then by spread.

        While nothing keeps the limits, the latest trials, those nearest to keeping them first.
        """
        latest = [trial for trial in self._first.values() if trial.is_feasible][-_POPULATION:]
        if not latest:
            costed = [trial for trial in self._first.values() if trial.costs is not None]
            return sorted(costed[-_POPULATION:], key=lambda one: max(one.constraints.values()))
        several = list({id(trial): trial for trial in (*self._front, *latest)}.values())
        costs = [trial.costs for trial in several if trial.costs is not None]
        places = ranks(costs)
        ordered: list[_Trial] = []
        for place in range(max(places) + 1):
            level = [index for index, own in enumerate(places) if own == place]
            ordered += [several[level[i]] for i in spread_order([costs[i] for i in level])]
        return ordered

    def _novelty(self, pool: Sequence[_Candidate]) -> Tensor:
        """Distance of each candidate from the nearest trial."""
        trials = [one for one in self._first.values() if one.known is not _UNKNOWN]
        if not trials:
            return torch.zeros(len(pool))
        return distances(_features(trials), _features(pool)).min(dim=0).values

    def _merit(self, pool: Sequence[_Candidate], seed: int) -> Tensor:
        """Expected gain of each candidate, times its chance of having values within all limits.

        Where nothing gains anything, novelty stands for the gain.
        """
        trained = self._latest(lambda one: one.costs is not None)
        costs = [one.costs for one in trained if one.costs is not None]
        pending = [one for one in self._first.values() if not one.is_settled]
        asked = [*pool, *pending]
        surrogate = Surrogate(_features(trained), _features(asked))
        axes = [
            self._axis(objective, asked, [row[index] for row in costs], surrogate)
            for index, objective in enumerate(self._objectives)
        ]
        count = len(pool)
        front = [one.costs for one in self._front if one.costs is not None]
        # What runs is taken to end as predicted, so that its neighbours gain little.
        front += list(zip(*(axis.mean[count:].tolist() for axis in axes), strict=True))
        merit = expected_gain([axis.first(count) for axis in axes], front, seed)
        if not merit.any():
            merit = self._novelty(pool)
        for name in sorted({name for one in trained for name in one.constraints}):
            values = [one.constraints.get(name, 0.0) for one in trained]
            if max(values) > 0:
                merit *= _chance(surrogate, values)[:count]
        ended = self._latest(lambda one: one.costs is not None or one.has_failed)
        if len(ended) > len(trained):
            surrogate = Surrogate(_features(ended), _features(pool))
            merit *= _chance(surrogate, [1.0 if one.costs is None else -1.0 for one in ended])
        return merit

    def _latest(self, is_wanted: Callable[[_Trial], bool]) -> list[_Trial]:
        """The trials to learn from: the front, and the latest of those wanted."""
        known = [one for one in self._first.values() if one.known is not _UNKNOWN]
        wanted = [one for one in known if is_wanted(one)]
        return list({id(one): one for one in (*self._front, *wanted[-_TRAINED:])}.values())

    def _axis(
        self,
        objective: Objective,
        asked: Sequence[_Candidate],
        costs: Sequence[float],
        surrogate: Surrogate,
    ) -> Axis:
        """The box of an objective, and where the candidates are expected on it."""
        best, worst = min(costs), max(costs)
        if objective.metric in MEASURED_AFTER_TRAINING:
            found = surrogate.predict(costs)
            mean_Q, deviation_Q = found.mean, found.deviation
        else:
            known = [_cost(objective, one.known.metrics[objective.metric]) for one in asked]
            best, worst = min(best, *known), max(worst, *known)
            mean_Q, deviation_Q = torch.tensor(known, dtype=torch.float64), None
        if objective.metric == "recall":
            best, worst = sorted((0.0, _cost(objective, 1.0)))
        else:
            best, worst = best - _MARGIN, worst + _MARGIN
        if objective.reference is not None:
            worst = _cost(objective, objective.reference)
        return Axis(best, worst, mean_Q, deviation_Q)


def _chance(surrogate: Surrogate, values: Sequence[float]) -> Tensor:
    """Chance of each architecture asked about that a value is at most 0."""
    found = surrogate.predict(values)
    return chance_below(0.0, found.mean, found.deviation)


def _features(several: Sequence[_Candidate]) -> list[Features]:
    return [one.known.features for one in several]


def _cost(objective: Objective, value: float) -> float:
    """A value as something to be minimised; all but recall by its logarithm."""
    sign = 1 if objective.direction == "minimize" else -1
    return sign * (value if objective.metric == "recall" else math.log10(max(value, _LEAST)))
