"""ModelSpec -> ArchSpec: the one place that knows the conditional structure of the search space.

Every way of picking an architecture (a sampler, a random draw, a walk over the whole space, a
corner) is a `choose` function asked, by name, for one of several candidates. A choice that has one
candidate is never asked, nor one that a mixer tells to make no difference beside those before it;
none is asked twice, and one name always has the same candidates: what is tied has one name, and a
choice that is left with fewer candidates names those as well.

Names are `width`, `repeat`, `layer0.mixer`, `layer0.<mixer>.<field>`, `channel_mixer` and
`channel_mixer.<kind>.ratio`. Within a mixer made of mixers, part 0 is `layer0.<mixer>.part0`, and
its choices are `layer0.<mixer>.part0.mixer` and so on. A block has `layer0.repeat` and its layers'
choices in `layer0.layer0`. A ratio has `layer0.of`, `layer0.mix0.share` and `layer0.mix0.place`,
and its layers' choices in `layer0.mix0` and `layer0.rest`. What is untied in these stands in
`layer0.copy0.layer0`, and so on; what slots are tied by, in `tie.<name>` instead of their place.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from archsearch.arch import NO_MIXER, ArchSpec, ChannelSpec, LayerSpec
from archsearch.idle import is_idle
from archsearch.model_spec import Block, ModelSpec, Piece, Ratio, Slot, layers_of, positions
from archsearch.space import Value

T = TypeVar("T")

Choose = Callable[[str, tuple[Value, ...]], Value]
"""(name, candidates) -> one of the candidates."""

Topic = Literal[
    "width", "repeat", "of", "share", "place", "mixer", "field", "channel_mixer", "channel_ratio"
]


@dataclass(frozen=True)
class Question:
    """An open decision: its name, its candidates, and what it is about."""

    name: str
    candidates: tuple[Value, ...]
    topic: Topic
    mixers: tuple[str, ...] = ()
    """Of the layers that a field, share or place is about."""
    field: str = ""
    depth: float = 0.0
    """Where the first layer that a mixer or field is about stands, from 0 to 1 of the stack."""
    places: tuple[tuple[float, ...], ...] = ()
    """For each candidate of a place: where its layers stand, from 0 to 1 of the ratio."""


Ask = Callable[[Question], Value]


@dataclass(frozen=True)
class Assignment:
    """One architecture and the decisions that lead to it, by name."""

    arch: ArchSpec
    params: Mapping[str, Value]


def compose(model: ModelSpec, choose: Choose) -> ArchSpec:
    """Build one architecture by asking `choose` for every open decision, in a fixed order."""
    return answer(model, lambda question: choose(question.name, question.candidates))


def answer(model: ModelSpec, reply: Ask) -> ArchSpec:
    """As `compose`, for a reply that looks at what a question is about."""
    ask = _once(reply)
    width = ask(Question("width", model.width, "width"))
    repeat = ask(Question("repeat", model.repeat, "repeat"))
    seats = _unfold(model.layers, ask)
    built: dict[str, LayerSpec] = {}
    layers = [
        _layer(seat, int(width), (i + 0.5) / len(seats), ask, built) for i, seat in enumerate(seats)
    ]
    kept = tuple(layer for layer in layers if layer is not None)
    kinds = tuple(option.kind for option in model.channel_mixer)
    kind = ask(Question("channel_mixer", kinds, "channel_mixer"))
    option = next(option for option in model.channel_mixer if option.kind == kind)
    name = f"channel_mixer.{kind}.ratio"
    ratio = ask(Question(name, option.ratio, "channel_ratio")) if option.ratio else 0.0
    return ArchSpec(
        width=int(width),
        layers=kept * int(repeat),
        channel_mixer=ChannelSpec(kind=str(kind), ratio=float(ratio)),
        norm=model.norm,
        tied_head=model.tied_head,
    )


def _once(reply: Ask) -> Ask:
    """Ask nothing that has one candidate, and nothing twice."""
    known: dict[str, Value] = {}

    def ask(question: Question) -> Value:
        if len(question.candidates) == 1:
            return question.candidates[0]
        if question.name not in known:
            known[question.name] = reply(question)
        return known[question.name]

    return ask


@dataclass(frozen=True)
class _Around:
    """A block or a ratio around a layer, and which of its copies the layer is in."""

    name: str
    copy: int
    untied: tuple[str, ...]


@dataclass(frozen=True)
class _Seat:
    """One layer to be chosen, and what its choices are called."""

    slot: Slot
    name: str
    around: tuple[_Around, ...]

    def named(self, path: str) -> str:
        """The name of the choice at a path such as `attention.heads`."""
        key, tie = path.rpartition(".")[2], self.slot.tie
        steps: list[str] = []
        for one in self.around:
            steps += [] if tie and key not in one.untied else [one.name]
            steps += [f"copy{one.copy}"] if key in one.untied else []
        return ".".join([*steps, f"tie.{tie}" if tie else self.name, path])


def _unfold(pieces: Sequence[Piece], ask: Ask, around: tuple[_Around, ...] = ()) -> list[_Seat]:
    """The layers of a stack in order of depth: asks how many there are, and what stands where."""
    seats: list[_Seat] = []
    for index, piece in enumerate(pieces):
        name = f"layer{index}"
        path = ".".join([*(one.name for one in around), name])
        if isinstance(piece, Block):
            repeat = ask(Question(f"{path}.repeat", piece.repeat, "repeat"))
            for copy in range(int(repeat)):
                seats += _unfold(piece.layers, ask, (*around, _Around(name, copy, piece.untied)))
        elif isinstance(piece, Ratio):
            copies: Counter[str] = Counter()
            for kind, slot in _mixed(piece, path, ask):
                inside = _Around(name, copies[kind], piece.untied)
                seats.append(_Seat(slot, kind, (*around, inside)))
                copies[kind] += 1
        else:
            seats.append(_Seat(piece, name, around))
    return seats


def _mixed(ratio: Ratio, path: str, ask: Ask) -> list[tuple[str, Slot]]:
    """The layers of a ratio in order of depth, each with its name in it."""
    of = int(ask(Question(f"{path}.of", ratio.of, "of")))
    least = [min(layers_of(share, of) for share in part.share) for part in ratio.mix]
    layers: list[tuple[str, Slot]] = [("rest", ratio.rest)] * of
    free = list(range(of))
    for index, part in enumerate(ratio.mix):
        name = f"{path}.mix{index}"
        mixers = tuple(option.mixer for option in part.layer.options)
        room = len(free) - sum(least[index + 1 :])
        numbers = [layers_of(share, of) for share in part.share]
        shares, marked = _distinct([n if n <= room else None for n in numbers], part.share)
        share = ask(Question(f"{name}.share{marked}", shares, "share", mixers))
        number = layers_of(float(share), of)
        taken: dict[Value, tuple[int, ...]] = {
            place: positions(place, number, len(free)) for place in part.place
        }
        places, marked = _distinct(list(taken.values()), part.place)
        at = tuple(tuple((free[i] + 0.5) / of for i in taken[place]) for place in places)
        place = ask(Question(f"{name}.place{marked}", places, "place", mixers, places=at))
        mine = [free[i] for i in taken[place]]
        for position in mine:
            layers[position] = (f"mix{index}", part.layer)
        free = [position for position in free if position not in mine]
    return layers


def _distinct(outcomes: Sequence[Any], candidates: tuple[T, ...]) -> tuple[tuple[T, ...], str]:
    """The first candidate of every outcome but None, and a mark of them if they are not all."""
    kept: dict[Any, T] = {}
    for outcome, candidate in zip(outcomes, candidates, strict=True):
        if outcome is not None:
            kept.setdefault(outcome, candidate)
    few = tuple(kept.values())
    return few, "" if len(few) == len(candidates) else f"({','.join(map(str, few))})"


def _layer(
    seat: _Seat, width: int, depth: float, ask: Ask, built: dict[str, LayerSpec]
) -> LayerSpec | None:
    """Choose one layer; equal ones are built once."""

    def fill(slot: Slot, path: str, width: int | None) -> LayerSpec | None:
        mixers = tuple(option.mixer for option in slot.options)
        mixer = str(ask(Question(seat.named(f"{path}mixer"), mixers, "mixer", depth=depth)))
        if mixer == NO_MIXER:
            return None
        option = slot.options[mixers.index(mixer)]
        inner = f"{path}{mixer}."
        parts = [fill(part, f"{inner}part{i}.", None) for i, part in enumerate(option.parts)]
        given = tuple(part for part in parts if part is not None)
        fields: dict[str, Value] = {}
        searched = tuple(option.fields.items())
        for i, (key, values) in enumerate(searched):
            if width is not None and is_idle(mixer, width, fields, given, searched[i:]):
                fields[key] = values[0]
            else:
                name = seat.named(inner + key)
                fields[key] = ask(Question(name, values, "field", (mixer,), key, depth))
        known = repr((mixer, fields, given))
        if known not in built:
            built[known] = LayerSpec(mixer=mixer, fields=fields, parts=given)
        return built[known]

    return fill(seat.slot, "", width)


def count(model: ModelSpec) -> int:
    """Number of ways to choose as written: every value of a field with every value of the others.

    Architectures that can be chosen in several ways count as often.
    """
    stacks = math.prod(map(_ways, _apart(model.layers)))
    channels = sum(max(1, len(option.ratio)) for option in model.channel_mixer)
    return len(model.width) * len(model.repeat) * stacks * channels


def _apart(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in groups that no tie joins, so that their choices are independent."""
    groups: list[tuple[set[str], list[Piece]]] = []
    for piece in pieces:
        ties, joined = {slot.tie for slot in piece.slots if slot.tie}, [piece]
        linked = [group for group in groups if group[0] & ties]
        groups = [group for group in groups if not group[0] & ties]
        for others, with_them in linked:
            ties, joined = ties | others, with_them + joined
        groups.append((ties, joined))
    return [joined for _ties, joined in groups]


def _ways(pieces: Sequence[Piece]) -> int:
    """Number of ways to choose in a stack: for every arrangement of its layers, to fill them."""
    return sum(
        _ways_to_fill(seats) for seats, _path in _paths(lambda reply: _unfold(pieces, _once(reply)))
    )


def _ways_to_fill(seats: Sequence[_Seat]) -> int:
    """Number of ways to choose mixers and fields, where some have their choices in common.

    Seats whose mixer is one choice are taken together. A field that several such groups share is
    asked by the first that uses it; so the ways are summed by which of these are asked already.
    """
    together: dict[str, list[_Seat]] = {}
    for seat in seats:
        together.setdefault(seat.named("mixer"), []).append(seat)
    groups = [_ways_of_mixers(group, group[0].slot, "") for group in together.values()]
    uses = Counter(name for group in groups for name in set(itertools.chain(*group)))
    shared = {name for name, groups_of_it in uses.items() if groups_of_it > 1}
    ways: Mapping[frozenset[str], int] = {frozenset(): 1}
    for group in groups:
        after: Counter[frozenset[str]] = Counter()
        for asked, number in ways.items():
            for sizes in group:
                new = math.prod(size for name, size in sizes.items() if name not in asked)
                after[asked | (shared & sizes.keys())] += number * new
        ways = after
    return sum(ways.values())


def _ways_of_mixers(seats: Sequence[_Seat], slot: Slot, path: str) -> list[dict[str, int]]:
    """For each choice of mixers that these seats make together: how many values a field has."""
    found: list[dict[str, int]] = []
    for option in slot.options:
        inner = f"{path}{option.mixer}."
        own = {
            seat.named(inner + key): len(values)
            for seat in seats
            for key, values in option.fields.items()
        }
        parts = [
            _ways_of_mixers(seats, part, f"{inner}part{i}.") for i, part in enumerate(option.parts)
        ]
        for chosen in itertools.product(*parts):
            found.append(own | {name: size for part in chosen for name, size in part.items()})
    return found


def draw(model: ModelSpec, rng: random.Random) -> Assignment:
    """Draw one architecture uniformly at every decision."""
    params: dict[str, Value] = {}

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        return params.setdefault(name, rng.choice(candidates))

    return Assignment(compose(model, choose), params)


def walk(model: ModelSpec) -> Iterator[Assignment]:
    """Yield every architecture of the space once, in a fixed order."""
    seen: set[str] = set()
    for arch, path in _paths(lambda reply: answer(model, reply)):
        if arch.arch_hash not in seen:
            seen.add(arch.arch_hash)
            yield Assignment(arch, path.params)


def _paths(run: Callable[[Ask], T]) -> Iterator[tuple[T, "_Path"]]:
    """What `run` comes to for every way to answer its questions."""
    prefix: list[int] | None = []
    while prefix is not None:
        path = _Path(prefix)
        yield run(path.reply), path
        prefix = path.next_prefix()


@dataclass
class _Path:
    """Answers to the questions of one run: follows `prefix`, then takes first candidates."""

    prefix: list[int]
    taken: list[tuple[Question, int]] = field(default_factory=list)

    def reply(self, question: Question) -> Value:
        depth = len(self.taken)
        index = self.prefix[depth] if depth < len(self.prefix) else 0
        self.taken.append((question, index))
        return question.candidates[index]

    @property
    def params(self) -> dict[str, Value]:
        return {question.name: question.candidates[index] for question, index in self.taken}

    def next_prefix(self) -> list[int] | None:
        """The path after this one, as an odometer; None after the last."""
        indices = [index for _question, index in self.taken]
        while indices:
            if indices[-1] + 1 < len(self.taken[len(indices) - 1][0].candidates):
                return [*indices[:-1], indices[-1] + 1]
            indices.pop()
        return None
