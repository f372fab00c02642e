"""Children of architectures: two layers swapped, a mixer or a field changed, two parents crossed.

Works on the decisions of `compose`, so that every child is of the study's space; decisions that a
change brings along are drawn. Knows nothing of what is good.
"""

import random
from collections.abc import Mapping, Sequence

from archsearch.compose import Assignment, compose
from archsearch.model_spec import ModelSpec
from archsearch.space import Value

Params = Mapping[str, Value]
_MIXER = ".mixer"
"""How the name of the choice of a layer's mixer ends."""
_SWAPS = 0.2
_TWO_CHANGES = 0.2
_STEP = 0.75
"""Share of changes of a field that go to a candidate beside the present one."""


def child_of(model: ModelSpec, parents: Sequence[Params], rng: random.Random) -> Assignment:
    """A child of one parent or two. It may be the same as a parent."""
    params = dict(parents[0])
    if len(parents) > 1:
        params = _crossed(parents[0], parents[1], rng)
    elif len(places := _places(params)) > 1 and rng.random() < _SWAPS:
        params = _swapped(params, *rng.sample(places, 2))
    return _changed(model, params, () if params != parents[0] else _changes(params, rng), rng)


def _places(params: Params) -> list[str]:
    """What the decisions of a layer begin with, for every layer whose mixer is searched."""
    names = sorted(name for name in params if name.endswith(_MIXER) and ".part" not in name)
    return [name.removesuffix(_MIXER) for name in names]


def _changes(params: Params, rng: random.Random) -> tuple[str, ...]:
    """Decisions to change: one mostly; mixers and fields with the same chance."""
    if not params:
        return ()
    names = sorted(params)
    mixers = [name for name in names if name.endswith("mixer")]
    others = [name for name in names if not name.endswith("mixer")]
    count = 2 if rng.random() < _TWO_CHANGES else 1
    pools = [pool for pool in (mixers, others) if pool]
    return tuple(rng.choice(rng.choice(pools)) for _ in range(count))


def _changed(
    model: ModelSpec, params: Params, changes: Sequence[str], rng: random.Random
) -> Assignment:
    """The architecture nearest to some decisions, with the named ones changed."""
    taken: dict[str, Value] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        kept = params.get(name)
        if kept not in candidates:
            taken[name] = rng.choice(candidates)
        elif name in changes:
            taken[name] = _other(candidates, candidates.index(kept), rng)
        else:
            taken[name] = kept
        return taken[name]

    return Assignment(compose(model, choose), taken)


def _other(candidates: Sequence[Value], present: int, rng: random.Random) -> Value:
    """Another candidate; of numbers mostly one beside the present one, in order of size."""
    if all(type(one) in (int, float) for one in candidates) and rng.random() < _STEP:
        kept = candidates[present]
        ordered = sorted(candidates, key=float)
        place = ordered.index(kept)
        return rng.choice(ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2])
    return rng.choice([one for index, one in enumerate(candidates) if index != present])


def _swapped(params: Params, first: str, second: str) -> dict[str, Value]:
    """Decisions with those of two layers exchanged; what the other slot lacks is drawn later."""
    other = {first: second, second: first}
    found: dict[str, Value] = {}
    for name, value in params.items():
        place = _place_of(name, (first, second))
        found[other.get(place, place) + name.removeprefix(place)] = value
    return found


def _crossed(first: Params, second: Params, rng: random.Random) -> dict[str, Value]:
    """Each layer, and each decision beside the layers, from one of two parents."""
    places = sorted({*_places(first), *_places(second)})
    source: dict[str, Params] = {}
    found: dict[str, Value] = {}
    for name in sorted({*first, *second}):
        parent = source.setdefault(_place_of(name, places), rng.choice((first, second)))
        if name in parent:
            found[name] = parent[name]
    return found


def _place_of(name: str, places: Sequence[str]) -> str:
    """The layer that a decision is about; the decision itself if it is about none of these."""
    return next((place for place in places if name.startswith(f"{place}.")), name)
