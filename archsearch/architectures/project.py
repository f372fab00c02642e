"""The architecture of a study's space that is nearest to a published one, to begin a search with.

A slot takes, of the mixers it offers, the one whose layer in the published layout stands nearest
at the same relative depth; a slot that offers none of them stays empty if it may, or takes its
first mixer. Everything else takes the candidate nearest to the published value, and the block of
slots stands once if it may. Knows nothing of samplers.
"""

from archsearch.arch import NO_MIXER, ArchSpec, LayerSpec
from archsearch.compose import Assignment, compose
from archsearch.space import Value
from archsearch.spec import ModelSpec


def project(model: ModelSpec, published: ArchSpec) -> Assignment:
    """Return the projection of a published architecture into a space of architectures."""
    params: dict[str, Value] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        params[name] = _choice(name, candidates, len(model.layers), published)
        return params[name]

    return Assignment(compose(model, choose), params)


def _choice(name: str, candidates: tuple[Value, ...], slots: int, published: ArchSpec) -> Value:
    """Answer one of the questions of `compose`; what it asks is in its module."""
    place, *rest = name.split(".")
    channel = published.channel_mixer
    if place in ("width", "repeat"):
        return _nearest(published.width if place == "width" else 1, candidates)
    if place == "channel_mixer":
        return _nearest(channel.ratio if rest else channel.kind, candidates)
    depth = (int(place.removeprefix("layer")) + 0.5) / slots
    *within, last = rest  # within parts: the mixer made of them, `part0`, ...
    if len(within) % 2 == 0:
        twin = _twin(depth, candidates, published)
        if twin is not None:
            return twin.mixer
        return NO_MIXER if NO_MIXER in candidates else candidates[0]
    twin = _twin(depth, (within[-1],), published)
    return candidates[0] if twin is None else _nearest(twin.fields.get(last), candidates)


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
