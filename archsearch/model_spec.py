"""ModelSpec: the space of architectures of a study, in its one normal form. Plain data.

A stack is a list of pieces in order of depth: a slot is one layer, a block repeats a stack, and a
ratio mixes layers by their share of so many. `compose` turns a space into architectures.
Knows nothing of YAML, of mixers and of how a space is searched.
"""

import json
import math
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from archsearch.space import Value

Norm = Literal["layernorm", "rmsnorm"]
"""What stands before every mixer and at the end of a model."""

Placement = Literal["early", "late", "spread"]
"""Where the layers of a share stand among the places that are left; see `positions`."""

DEFAULT_PLACEMENT: Placement = "spread"


class Frozen(BaseModel):
    """Part of a study: it is never changed, and knows every one of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def canonical_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class Option(Frozen):
    """One alternative of a slot: a mixer and the candidates of each searched or narrowed field.

    Fields that are not listed keep their defaults. One candidate means fixed. A mixer that is made
    of mixers has a slot for each of its `parts`.
    """

    mixer: str
    fields: dict[str, tuple[Value, ...]] = {}
    parts: tuple["Slot", ...] = Field(default=(), exclude_if=lambda parts: not parts)


class Slot(Frozen):
    """One place in the order of depth, or one part of a mixer.

    More than one option means that the mixer is searched. Slots of one `tie` have the same options
    and make every choice together.
    """

    options: tuple[Option, ...]
    tie: str = Field(default="", exclude_if=lambda tie: not tie)

    @property
    def nested(self) -> tuple["Slot", ...]:
        """The slot itself, then those of the parts of its options."""
        parts = (part for option in self.options for part in option.parts)
        return (self, *parts)

    @property
    def slots(self) -> tuple["Slot", ...]:
        """The slot itself, as every piece of a stack lists its own."""
        return (self,)

    @property
    def mixed_slots(self) -> tuple["Slot", ...]:
        return ()

    @property
    def deepest(self) -> int:
        return 1

    @property
    def is_open(self) -> bool:
        """True if there is anything to choose here."""
        return any(
            len(slot.options) > 1
            or any(len(values) > 1 for values in slot.options[0].fields.values())
            for slot in self.nested
        )


Option.model_rebuild()


class Block(Frozen):
    """A stack that is repeated. The copies are alike, but for choices of the names in `untied`."""

    repeat: tuple[int, ...]
    layers: tuple["Piece", ...]
    untied: tuple[str, ...] = ()
    """Fields, or `mixer`, that every copy chooses for itself."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for piece in self.layers for slot in piece.slots)

    @property
    def mixed_slots(self) -> tuple[Slot, ...]:
        """Those of ratios in it."""
        return tuple(slot for piece in self.layers for slot in piece.mixed_slots)

    @property
    def deepest(self) -> int:
        """Most layers that it can be."""
        return max(self.repeat) * sum(piece.deepest for piece in self.layers)


class Share(Frozen):
    """A layer that stands in a share of a ratio's layers."""

    layer: Slot
    share: tuple[float, ...]
    place: tuple[Placement, ...] = (DEFAULT_PLACEMENT,)


class Ratio(Frozen):
    """So many layers: shares of some, placed one after the other, and of all the rest another.

    The layers of one share are alike, and so are the rest, but for choices in `untied`.
    """

    of: tuple[int, ...]
    mix: tuple[Share, ...]
    rest: Slot
    untied: tuple[str, ...] = ()
    """As in a block, for every layer."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*(part.layer for part in self.mix), self.rest)

    @property
    def mixed_slots(self) -> tuple[Slot, ...]:
        return self.slots

    @property
    def deepest(self) -> int:
        return max(self.of)


Piece = Slot | Block | Ratio
Block.model_rebuild()


def layers_of(share: float, depth: int) -> int:
    """Layers that a share of a depth is: the nearest whole number, halves up."""
    exact = Fraction(share).limit_denominator(10_000)  # 1/3 is meant, not the float next to it
    return math.floor(exact * depth + Fraction(1, 2))


def positions(place: Placement, number: int, room: int) -> tuple[int, ...]:
    """Which of `room` places in order of depth a `number` of layers takes.

    `early` the first, `late` the last, `spread` the middle of each of as many equal spans.
    """
    if place == "early":
        return tuple(range(number))
    if place == "late":
        return tuple(range(room - number, room))
    return tuple((2 * i + 1) * room // (2 * number) for i in range(number))


class ChannelOption(Frozen):
    """One alternative for the channel mixer, with the candidates of its inner ratio."""

    kind: str = "none"
    ratio: tuple[float, ...] = ()


class ModelSpec(Frozen):
    """The space of architectures: width, stack, how often the whole stack repeats, MLP."""

    width: tuple[int, ...]
    layers: tuple[Piece, ...]
    repeat: tuple[int, ...] = (1,)
    channel_mixer: tuple[ChannelOption, ...] = (ChannelOption(),)
    norm: Norm = Field(default="layernorm", exclude_if=lambda norm: norm == "layernorm")
    tied_head: bool = Field(default=True, exclude_if=lambda tied: tied)

    @property
    def layer_slots(self) -> tuple[Slot, ...]:
        """The slots of layers in order of depth, those of blocks and ratios once."""
        return tuple(slot for piece in self.layers for slot in piece.slots)

    @property
    def settled_slots(self) -> tuple[Slot, ...]:
        """The slots of layers that no ratio moves."""
        mixed = [slot for piece in self.layers for slot in piece.mixed_slots]
        return tuple(slot for slot in self.layer_slots if slot not in mixed)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots: each layer's, followed by those of the parts that it may have."""
        return tuple(slot for layer in self.layer_slots for slot in layer.nested)

    @property
    def options(self) -> tuple[Option, ...]:
        """All options of all slots."""
        return tuple(option for slot in self.slots for option in slot.options)

    @property
    def deepest(self) -> int:
        """Most layers that an architecture can have."""
        return max(self.repeat) * sum(piece.deepest for piece in self.layers)
