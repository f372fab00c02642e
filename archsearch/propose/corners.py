"""Architectures found without a sampler: every one of a small space, its smallest and largest.

Spaces of up to `SMALL` ways to choose are walked through; of larger ones a fixed number is drawn.
Everything is a function of the study alone.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from archsearch.arch import ArchSpec
from archsearch.compose import compose, count
from archsearch.cost import compute_dtype, known_metric, state_bytes, violations
from archsearch.space import Value
from archsearch.spec import MEASURED_AFTER_TRAINING, ModelSpec, StudySpec

SMALL = 10_000
"""Ways to choose up to which a space is walked through."""
_WALKED_FOR_COSTS = 1_000
"""Architectures looked at to find corners; each costs some milliseconds."""


@dataclass(frozen=True)
class Assignment:
    """One architecture and the decisions that lead to it, by name."""

    arch: ArchSpec
    params: Mapping[str, Value]


@dataclass
class _Path:
    """Decisions of one `compose`: follows `prefix`, then takes first candidates."""

    prefix: list[int]
    taken: list[tuple[str, int, tuple[Value, ...]]] = field(default_factory=list)

    def choose(self, name: str, candidates: tuple[Value, ...]) -> Value:
        depth = len(self.taken)
        index = self.prefix[depth] if depth < len(self.prefix) else 0
        self.taken.append((name, index, candidates))
        return candidates[index]

    def next_prefix(self) -> list[int] | None:
        """The path after this one, as an odometer; None after the last."""
        indices = [index for _name, index, _candidates in self.taken]
        while indices:
            if indices[-1] + 1 < len(self.taken[len(indices) - 1][2]):
                return [*indices[:-1], indices[-1] + 1]
            indices.pop()
        return None


def assignments(model: ModelSpec) -> Iterator[Assignment]:
    """Every architecture of a space once, in a fixed order."""
    seen: set[str] = set()
    prefix: list[int] | None = []
    while prefix is not None:
        path = _Path(prefix)
        arch = compose(model, path.choose)
        if arch.arch_hash not in seen:
            seen.add(arch.arch_hash)
            yield Assignment(arch, {name: options[i] for name, i, options in path.taken})
        prefix = path.next_prefix()


def drawn(model: ModelSpec, seed: int) -> Iterator[Assignment]:
    """Random architectures for ever, repeats left in."""
    rng = random.Random(seed)
    while True:
        params: dict[str, Value] = {}

        def choose(
            name: str, candidates: tuple[Value, ...], params: dict[str, Value] = params
        ) -> Value:
            return params.setdefault(name, rng.choice(candidates))

        yield Assignment(compose(model, choose), params)


def sample(spec: StudySpec) -> list[Assignment]:
    """Feasible architectures to find corners among, smallest state first."""
    if count(spec.model) <= _WALKED_FOR_COSTS:
        candidates = assignments(spec.model)
    else:
        source = drawn(spec.model, spec.seed)
        unique = {
            one.arch.arch_hash: one for one in (next(source) for _ in range(_WALKED_FOR_COSTS))
        }
        candidates = iter(unique.values())
    dtype = compute_dtype(spec.train.precision)
    sized = [
        (state_bytes(one.arch, spec.task.longest, dtype), one.arch.arch_hash, one)
        for one in candidates
        if not violations(one.arch, spec)
    ]
    return [one for _size, _hash, one in sorted(sized, key=lambda entry: entry[:2])]


def warm_start(spec: StudySpec, feasible: list[Assignment]) -> list[Assignment]:
    """The architectures that a study asks to begin with; `feasible` is from `sample`."""
    if not feasible:
        return []
    places = {"smallest": 0, "middle": len(feasible) // 2, "largest": len(feasible) - 1}
    indices = dict.fromkeys(places[name] for name in spec.search.warm_start)
    return [feasible[index] for index in indices]


def largest(spec: StudySpec, feasible: list[Assignment]) -> dict[str, float]:
    """Largest value of every objective that the architecture alone decides."""
    found: dict[str, float] = {}
    for objective in spec.objectives:
        if objective.metric in MEASURED_AFTER_TRAINING or not feasible:
            continue
        context = objective.context or spec.task.longest
        found[objective.metric] = float(
            max(known_metric(one.arch, spec, objective.metric, context) for one in feasible)
        )
    return found


def unseen(spec: StudySpec, known: set[str]) -> list[Assignment]:
    """What is left of a small space, in an order shuffled by the study's seed."""
    left = [one for one in assignments(spec.model) if one.arch.arch_hash not in known]
    random.Random(spec.seed).shuffle(left)
    return left
