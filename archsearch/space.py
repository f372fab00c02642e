"""Search domains a mixer declares beside its fields, and how they are read off a config dataclass.

Every domain is finite and ordered, so a study can be counted, its corners found, and an exhausted
space recognised. Knows nothing of Optuna or YAML.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

Value = bool | int | float | str


@dataclass(frozen=True)
class Part:
    """One of the mixers that a composite mixer is made of, and the values of its fields."""

    mixer: str
    fields: Mapping[str, Value]


Parts = tuple[Part, ...]


@dataclass(frozen=True, init=False)
class Choice:
    """An explicit list of values: `Annotated[int, Choice(1, 2, 4)]`.

    `aliases` are other names of values: read as the values they stand for, and never searched.
    """

    values: tuple[Value, ...]
    aliases: Mapping[str, str] = dataclasses.field(hash=False)

    def __init__(self, *values: Value, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        if not values:
            raise ValueError("Choice needs at least one value")
        if not set(aliases.values()) <= set(values):
            raise ValueError(f"aliases stand for {set(aliases.values())}; the values are {values}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "aliases", aliases)


@dataclass(frozen=True)
class Range:
    """Integers from `low` to `high`, both included, spaced linearly by `step` or doubling."""

    low: int
    high: int
    step: int = 1
    scale: Literal["linear", "log2"] = "linear"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"Range is empty: from {self.low} to {self.high}")
        if self.step < 1:
            raise ValueError(f"Range step is {self.step}; it must be at least 1")
        if self.scale == "log2" and self.low < 1:
            raise ValueError(f"a log2 Range starts at {self.low}; it must start at 1 or more")

    @property
    def values(self) -> tuple[int, ...]:
        if self.scale == "linear":
            return tuple(range(self.low, self.high + 1, self.step))
        values = [self.low]
        while values[-1] * 2 <= self.high:
            values.append(values[-1] * 2)
        return tuple(values)


Domain = Choice | Range


@dataclass(frozen=True)
class Field:
    """One field of a mixer's config. `domain` is None where nothing is searched by default."""

    name: str
    type: type
    default: Value
    domain: Domain | None
    doc: str

    @property
    def candidates(self) -> tuple[Value, ...]:
        """What a search tries when the study does not narrow it."""
        return (self.default,) if self.domain is None else self.domain.values

    def named(self, value: Value) -> Value:
        """The value that an alias or an integer among numbers stands for; any other as it is."""
        if isinstance(self.domain, Choice) and isinstance(value, str):
            return self.domain.aliases.get(value, value)
        if self.type is float and isinstance(value, int | float) and not isinstance(value, bool):
            return value + 0.0  # which turns -0.0 round, too
        return value

    @property
    def doubles(self) -> bool:
        """True if every declared value is twice the one before: sizes in powers of two."""
        values = self.candidates
        return (
            self.type is int
            and len(values) > 1
            and all(int(after) == 2 * int(one) > 0 for one, after in itertools.pairwise(values))
        )


@cache
def fields_of(config: type) -> Mapping[str, Field]:
    """Read the searchable and fixed fields off a config dataclass, in declaration order.

    `d_model` and `parts` are left out: the model's width gives the first, the second is no plain
    value. A field is `Annotated[type, domain, "doc"]`, where both annotations are optional.

    Raises:
        TypeError: a field without a default, or of a type that is not bool, int, float or str.
    """
    hints = get_type_hints(config, include_extras=True)
    found: dict[str, Field] = {}
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if field.name == "d_model" or hint == Parts:
            continue
        annotated = get_origin(hint) is Annotated
        kind, *notes = get_args(hint) if annotated else (hint,)
        where = f"{config.__qualname__}.{field.name}"
        if kind not in (bool, int, float, str):
            raise TypeError(f"{where} has type {kind}; a field is a bool, int, float or str")
        if field.default is dataclasses.MISSING:
            raise TypeError(f"{where} has no default")
        domain = next((note for note in notes if isinstance(note, Choice | Range)), None)
        doc = next((note for note in notes if isinstance(note, str)), "")
        found[field.name] = Field(field.name, kind, field.default, domain, doc)
    return MappingProxyType(found)
