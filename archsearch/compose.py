"""ModelSpec -> ArchSpec: the one place that knows the conditional structure of the search space.

Every way of picking an architecture (a sampler, a random draw, a walk over the whole space, a
corner) is a `choose` function asked, by name, for one of several candidates. A choice that has one
candidate is never asked. Names are `width`, `repeat`, `layer0.mixer`, `layer0.<mixer>.<field>`,
`channel_mixer` and `channel_mixer.<kind>.ratio`.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.space import Value
from archsearch.spec import ModelSpec, Slot

Choose = Callable[[str, tuple[Value, ...]], Value]
"""(name, candidates) -> one of the candidates."""

NO_LAYER = "none"
"""Option of a slot that leaves the layer out."""


def compose(model: ModelSpec, choose: Choose) -> ArchSpec:
    """Build one architecture by asking `choose` for every open decision, in a fixed order."""

    def pick(name: str, candidates: tuple[Value, ...]) -> Value:
        return candidates[0] if len(candidates) == 1 else choose(name, candidates)

    width = pick("width", model.width)
    repeat = pick("repeat", model.repeat)
    block = [_layer(f"layer{i}", slot, pick) for i, slot in enumerate(model.layers)]
    kept = tuple(layer for layer in block if layer is not None)
    kind = pick("channel_mixer", tuple(option.kind for option in model.channel_mixer))
    option = next(option for option in model.channel_mixer if option.kind == kind)
    ratio = pick(f"channel_mixer.{kind}.ratio", option.ratio) if option.ratio else 0.0
    return ArchSpec(
        width=int(width),
        layers=kept * int(repeat),
        channel_mixer=ChannelSpec(kind=str(kind), ratio=float(ratio)),
    )


def _layer(name: str, slot: Slot, pick: Choose) -> LayerSpec | None:
    mixer = str(pick(f"{name}.mixer", tuple(option.mixer for option in slot.options)))
    if mixer == NO_LAYER:
        return None
    option = next(option for option in slot.options if option.mixer == mixer)
    fields = {
        field: pick(f"{name}.{mixer}.{field}", candidates)
        for field, candidates in option.fields.items()
    }
    return LayerSpec(mixer=mixer, fields=fields)


def count(model: ModelSpec) -> int:
    """Number of ways to choose; architectures equal up to inactive choices count once each way."""
    slots = math.prod(
        sum(math.prod(len(values) for values in option.fields.values()) for option in slot.options)
        for slot in model.layers
    )
    channels = sum(max(1, len(option.ratio)) for option in model.channel_mixer)
    return len(model.width) * len(model.repeat) * slots * channels


def draw(model: ModelSpec, rng: random.Random) -> ArchSpec:
    """Draw one architecture uniformly at every decision."""
    return compose(model, lambda _name, candidates: rng.choice(candidates))


def walk(model: ModelSpec) -> Iterator[ArchSpec]:
    """Yield every architecture of the space once, in a fixed order."""
    seen: set[str] = set()
    for choices in _paths(model):
        arch = compose(model, _follow(choices))
        if arch.arch_hash not in seen:
            seen.add(arch.arch_hash)
            yield arch


def _follow(choices: dict[str, Value]) -> Choose:
    return lambda name, _candidates: choices[name]


def _paths(model: ModelSpec) -> Iterator[dict[str, Value]]:
    """Every complete assignment of the decisions that `compose` would ask."""
    slots = [_slot_paths(f"layer{i}", slot) for i, slot in enumerate(model.layers)]
    channels: list[dict[str, Value]] = []
    for option in model.channel_mixer:
        for ratio in option.ratio or (0.0,):
            channels.append(
                {"channel_mixer": option.kind, f"channel_mixer.{option.kind}.ratio": ratio}
            )
    for width, repeat in itertools.product(model.width, model.repeat):
        for parts in itertools.product(*slots, channels):
            path: dict[str, Value] = {"width": width, "repeat": repeat}
            for part in parts:
                path |= part
            yield path


def _slot_paths(name: str, slot: Slot) -> list[dict[str, Value]]:
    paths: list[dict[str, Value]] = []
    for option in slot.options:
        for values in itertools.product(*option.fields.values()):
            fields = {
                f"{name}.{option.mixer}.{field}": value
                for field, value in zip(option.fields, values, strict=True)
            }
            paths.append({f"{name}.mixer": option.mixer, **fields})
    return paths
