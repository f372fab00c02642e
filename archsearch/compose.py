"""ModelSpec -> ArchSpec: the one place that knows the conditional structure of the search space.

Every way of picking an architecture (a sampler, a random draw, a walk over the whole space, a
corner) is a `choose` function asked, by name, for one of several candidates. A choice that has one
candidate is never asked. Names are `width`, `repeat`, `layer0.mixer`, `layer0.<mixer>.<field>`,
`channel_mixer` and `channel_mixer.<kind>.ratio`. Within a mixer made of mixers, part 0 is
`layer0.<mixer>.part0`, and its choices are `layer0.<mixer>.part0.mixer` and so on.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from archsearch.arch import NO_MIXER, ArchSpec, ChannelSpec, LayerSpec
from archsearch.space import Value
from archsearch.spec import ModelSpec, Slot

Choose = Callable[[str, tuple[Value, ...]], Value]
"""(name, candidates) -> one of the candidates."""


@dataclass(frozen=True)
class Assignment:
    """One architecture and the decisions that lead to it, by name."""

    arch: ArchSpec
    params: Mapping[str, Value]


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
        norm=model.norm,
        tied_head=model.tied_head,
    )


def _layer(name: str, slot: Slot, pick: Choose) -> LayerSpec | None:
    mixer = str(pick(f"{name}.mixer", tuple(option.mixer for option in slot.options)))
    if mixer == NO_MIXER:
        return None
    option = next(option for option in slot.options if option.mixer == mixer)
    fields = {
        key: pick(f"{name}.{mixer}.{key}", candidates) for key, candidates in option.fields.items()
    }
    parts = [_layer(f"{name}.{mixer}.part{i}", part, pick) for i, part in enumerate(option.parts)]
    return LayerSpec(mixer=mixer, fields=fields, parts=tuple(part for part in parts if part))


def count(model: ModelSpec) -> int:
    """Number of ways to choose; architectures equal up to inactive choices count once each way."""
    slots = math.prod(map(_ways, model.layers))
    channels = sum(max(1, len(option.ratio)) for option in model.channel_mixer)
    return len(model.width) * len(model.repeat) * slots * channels


def _ways(slot: Slot) -> int:
    """Number of ways to choose in one slot."""
    return sum(
        math.prod([*map(len, option.fields.values()), *map(_ways, option.parts)])
        for option in slot.options
    )


def draw(model: ModelSpec, rng: random.Random) -> Assignment:
    """Draw one architecture uniformly at every decision."""
    params: dict[str, Value] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        return params.setdefault(name, rng.choice(candidates))

    return Assignment(compose(model, choose), params)


def walk(model: ModelSpec) -> Iterator[Assignment]:
    """Yield every architecture of the space once, in a fixed order."""
    seen: set[str] = set()
    prefix: list[int] | None = []
    while prefix is not None:
        path = _Path(prefix)
        arch = compose(model, path.choose)
        if arch.arch_hash not in seen:
            seen.add(arch.arch_hash)
            yield Assignment(arch, {name: options[i] for name, i, options in path.taken})
        prefix = path.next_prefix()


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
