"""Architectures found without a sampler: every one of a small space, its smallest and largest.

Spaces of up to `SMALL` ways to choose are walked through; of larger ones a fixed number is drawn.
Everything is a function of the study alone.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from archsearch.arch import ArchSpec
from archsearch.architectures import project, published_architecture
from archsearch.compose import Assignment, compose, count, draw, walk
from archsearch.cost import compute_dtype, known_metric, state_bytes
from archsearch.errors import FOREIGN_FAULTS
from archsearch.gate import is_excluded
from archsearch.model_spec import ModelSpec
from archsearch.space import Value
from archsearch.spec import CORNERS, MEASURED_AFTER_TRAINING, StudySpec, StudyStart

SMALL = 10_000
"""Ways to choose up to which a space is walked through."""
_LOOKED_AT = 1_000
"""Architectures that corners are looked for among."""
_COUNTED = 100
"""Of these, how many are counted to the last parameter, which takes some milliseconds each."""


def neighbours(
    model: ModelSpec, params: Mapping[str, Value], rng: random.Random
) -> Iterator[Assignment]:
    """Architectures near one, for ever: one decision changed, later two, then three...

    Decisions that a change brings along are drawn. Repeats are left in.
    """
    for attempt in itertools.count():
        changes = rng.sample(sorted(params), min(len(params), 1 + attempt // 20))
        taken: dict[str, Value] = {}

        def choose(
            name: str,
            candidates: tuple[Value, ...],
            taken: dict[str, Value] = taken,
            changes: list[str] = changes,
        ) -> Value:
            kept = params.get(name)
            if name in changes or kept not in candidates:
                taken[name] = rng.choice([one for one in candidates if one != kept])
            else:
                taken[name] = kept
            return taken[name]

        yield Assignment(compose(model, choose), taken)


def sample(spec: StudySpec) -> list[Assignment]:
    """Architectures to find corners among, smallest state first; limits are not looked at."""
    if count(spec.model) <= _LOOKED_AT:
        candidates = list(walk(spec.model))
    else:
        rng = random.Random(spec.seed)
        drawn = [draw(spec.model, rng) for _ in range(_LOOKED_AT)]
        candidates = list({one.arch.arch_hash: one for one in drawn}.values())
    sized = [(_size(one.arch, spec), one.arch.arch_hash, one) for one in candidates]
    sized.sort(key=lambda entry: entry[:2])
    return [one for size, _hash, one in sized if size >= 0]


def _size(arch: ArchSpec, spec: StudySpec) -> int:
    """State bytes; -1 if the mixers exclude the architecture or fail."""
    try:
        return state_bytes(arch, spec.task.longest, compute_dtype(spec.train.precision))
    except FOREIGN_FAULTS:
        return -1  # a proposal of it will say what is wrong


def warm_start(
    spec: StudySpec, borrowed: Sequence[Sequence[Mapping[str, Value]]] = ()
) -> list[Assignment]:
    """The architectures that a study asks to begin with, each once, in the order asked for.

    Args:
        borrowed: for each other study that is named, decisions that lead to its trials.
    """
    if not spec.search.warm_start:
        return []
    by_size = sample(spec)
    middle = len(by_size) // 2
    from_middle = sorted(range(len(by_size)), key=lambda index: abs(index - middle))
    in_order = (by_size, [by_size[index] for index in from_middle], by_size[::-1])
    orders = dict(zip(CORNERS, in_order, strict=True))
    found: dict[str, Assignment] = {}
    others = iter(borrowed)
    for start in spec.search.warm_start:
        if isinstance(start, StudyStart):
            order = [_of_params(spec.model, params) for params in next(others, ())]
        else:
            order = orders[start] if start in CORNERS else [_projected(start, spec)]
        wanted = len(order) if isinstance(start, StudyStart) else 1
        feasible = (one for one in order if not is_excluded(one.arch, spec))
        for one in itertools.islice(feasible, wanted):
            found.setdefault(one.arch.arch_hash, one)
    return list(found.values())


def _of_params(model: ModelSpec, params: Mapping[str, Value]) -> Assignment:
    return Assignment(compose(model, lambda name, _candidates: params[name]), params)


def _projected(name: str, spec: StudySpec) -> Assignment:
    return project(spec.model, published_architecture(name).build())


def largest(spec: StudySpec) -> dict[str, float]:
    """Largest value in the space of every objective that the architecture alone decides."""
    wanted = {
        objective.metric: spec.place_of(objective)[1]
        for objective in spec.objectives
        if objective.metric not in MEASURED_AFTER_TRAINING
    }
    if not wanted:
        return {}
    by_size = sample(spec)
    few = by_size[:: max(1, len(by_size) // _COUNTED)] + by_size[-1:]
    found: dict[str, float] = {}
    for one in few:
        # Its state can be sized, and still a mixer's code may fail on the rest.
        with contextlib.suppress(*FOREIGN_FAULTS):
            for metric, context in wanted.items():
                value = float(known_metric(one.arch, spec, metric, context))
                found[metric] = max(value, found.get(metric, value))
    return found


def shuffled(spec: StudySpec) -> list[Assignment]:
    """Every architecture of a small space, in an order shuffled by the study's seed."""
    found = list(walk(spec.model))
    random.Random(spec.seed).shuffle(found)
    return found
