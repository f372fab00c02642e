"""The architecture of a study's space that is nearest to a published one, to begin a search with.

A layer takes, of the mixers it offers, the one whose layer in the published layout stands nearest
at the same relative depth; a layer that offers none of them stays empty if it may, or takes its
first mixer. A share takes the candidate nearest to what the published layout has of its mixers, and
stands where they do. Everything else takes the candidate nearest to the published value, and
whatever is repeated stands once if it may. Knows nothing of samplers.
"""

from collections.abc import Sequence

from archsearch.arch import NO_MIXER, ArchSpec, LayerSpec
from archsearch.compose import Assignment, Question, answer
from archsearch.model_spec import ModelSpec
from archsearch.space import Value


def project(model: ModelSpec, published: ArchSpec) -> Assignment:
    """Return the projection of a published architecture into a space of architectures."""
    params: dict[str, Value] = {}

    def reply(question: Question) -> Value:
        params[question.name] = _reply(question, published)
        return params[question.name]

    return Assignment(answer(model, reply), params)


def _reply(question: Question, published: ArchSpec) -> Value:
    candidates, channel = question.candidates, published.channel_mixer
    plain: dict[str, Value] = {
        "width": published.width,
        "repeat": 1,
        "of": len(published.layers),
        "channel_mixer": channel.kind,
        "channel_ratio": channel.ratio,
    }
    if question.topic in plain:
        return _nearest(plain[question.topic], candidates)
    if question.topic == "share":
        number = len(_depths(question.mixers, published))
        return _nearest(number / max(1, len(published.layers)), candidates)
    if question.topic == "place":
        return _nearest_place(question, published)
    if question.topic == "mixer":
        twin = _twin(question.depth, candidates, published)
        if twin is not None:
            return twin.mixer
        return NO_MIXER if NO_MIXER in candidates else candidates[0]
    twin = _twin(question.depth, question.mixers, published)
    return candidates[0] if twin is None else _nearest(twin.fields.get(question.field), candidates)


def _depths(mixers: Sequence[Value], published: ArchSpec) -> list[float]:
    """Relative depths of the published layers that are, or have a part of, one of these mixers."""
    return [
        (i + 0.5) / len(published.layers)
        for i, layer in enumerate(published.layers)
        if any(one.mixer in mixers for one in layer.nested)
    ]


def _nearest_place(question: Question, published: ArchSpec) -> Value:
    """The place whose layers are nearest to the published ones, and those to them."""
    theirs = _depths(question.mixers, published)
    if not theirs:
        return question.candidates[0]

    def distance(ours: Sequence[float]) -> float:
        there = sum(min(abs(one - other) for other in theirs) for one in ours) / len(ours)
        back = sum(min(abs(one - other) for other in ours) for one in theirs) / len(theirs)
        return there + back

    places = zip(question.candidates, question.places, strict=True)
    return min(places, key=lambda place: distance(place[1]))[0]


def _twin(depth: float, mixers: tuple[Value, ...], published: ArchSpec) -> LayerSpec | None:
    """The published layer, or part of one, with one of these mixers nearest to a relative depth."""
    count = len(published.layers)
    places = [
        (abs((i + 0.5) / count - depth), one)
        for i, layer in enumerate(published.layers)
        for one in layer.nested
        if one.mixer in mixers
    ]
    return min(places, key=lambda place: place[0])[1] if places else None


def _nearest(value: Value | None, candidates: tuple[Value, ...]) -> Value:
    """The candidate nearest to a value: itself, the nearest number, or else the first."""
    if value is not None and value in candidates:
        return value
    numbers = [one for one in candidates if isinstance(one, int | float)]
    if isinstance(value, int | float) and numbers:
        return min(numbers, key=lambda one: abs(one - value))
    return candidates[0]
