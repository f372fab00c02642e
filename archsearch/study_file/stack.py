"""The `layers` of a study, in order of depth: single layers, repeated blocks, ratios of layers.

A block is `{repeat: ..., layers: [...]}`, a ratio `{ratio: {of: ..., mix: [...], rest: ...}}`. What
is wrong with one alone is found as it is read, what is wrong with the whole stack by `check_stack`.
Knows nothing of what stands around the layers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import get_args

from archsearch.errors import nearest
from archsearch.model_spec import (
    DEFAULT_PLACEMENT,
    Block,
    Piece,
    Placement,
    Ratio,
    Share,
    Slot,
    layers_of,
)
from archsearch.study_file.grammar import (
    Cursor,
    Key,
    Kind,
    Rejected,
    choice,
    items,
    listing,
    one_or_list,
    scalar,
    section,
    text,
    whole,
)
from archsearch.study_file.mixers import IN_RATIO, IN_STACK, RATIO, REPEAT, TIE, read_slot
from archsearch.yaml_file import Data, Route

MAX_LAYERS = 256
MIXER = "mixer"
"""What `untied` calls the choice of a mixer."""


def read_layers(cursor: Cursor) -> tuple[Piece, ...]:
    """Read a list of layers. Raises Rejected once every problem in it is noted."""
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of layers in order of depth, each {IN_STACK.accepts}")
    if len(cursor.value) > MAX_LAYERS:
        raise cursor.refuse(f"{len(cursor.value)} layers; at most {MAX_LAYERS}")
    return items(cursor, _piece, distinct=False)


def _piece(cursor: Cursor) -> Piece:
    value = cursor.value
    if isinstance(value, dict) and "one_of" not in value and REPEAT in value:
        return _block(cursor)
    if isinstance(value, dict) and [*value] == [RATIO]:
        return _ratio(cursor.at(RATIO))
    return read_slot(cursor, IN_STACK)


_FRACTION = r"^ *[0-9]{1,9} */ *0*[1-9][0-9]{0,8} *$"


def _parse_share(value: Data) -> float:
    if isinstance(value, str):
        if re.match(_FRACTION, value) is None:
            raise ValueError
        value = float(Fraction(value.replace(" ", "")))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError
    return float(value)


_SHARE = scalar(
    "a share from 0 to 1, such as 1/8 or 0.25",
    {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "string", "pattern": _FRACTION},
        ]
    },
    _parse_share,
)
_MIXED: Kind[Slot] = Kind(
    IN_RATIO.accepts, {"$ref": "#/$defs/mixed"}, lambda cursor: read_slot(cursor, IN_RATIO)
)
_UNTIED = Key(
    "untied",
    listing(text(f"a field's name, or {MIXER}")),
    f"Fields, or {MIXER}, that every copy chooses for itself; all copies are alike by default.",
)
PART_SECTION = section(
    (
        Key("layer", _MIXED, "What has this share.", required=True),
        Key(
            "share", one_or_list(_SHARE), "Share of the layers; a list is searched.", required=True
        ),
        Key(
            "place",
            one_or_list(choice(get_args(Placement))),
            "Where it stands among the places that are left: first, last or evenly spaced. Default "
            f"{DEFAULT_PLACEMENT}.",
        ),
    )
)
RATIO_SECTION = section(
    (
        Key(
            "of",
            one_or_list(whole(maximum=MAX_LAYERS)),
            "Number of layers; a list is searched.",
            required=True,
        ),
        Key(
            "mix", listing(PART_SECTION, distinct=False), "Layers that have a share.", required=True
        ),
        Key("rest", _MIXED, "What all other layers are.", required=True),
        _UNTIED,
    )
)
BLOCK_SECTION = section(
    (
        Key(
            REPEAT,
            one_or_list(whole(maximum=MAX_LAYERS)),
            "How often the layers stand one after the other; a list is searched.",
            required=True,
        ),
        Key(
            "layers",
            Kind(f"a list of layers, each {IN_STACK.accepts}", {}, read_layers),
            "What is repeated, in order of depth.",
            required=True,
        ),
        _UNTIED,
    )
)


def _block(cursor: Cursor) -> Block:
    block = Block.model_validate(BLOCK_SECTION.read(cursor))
    if block.untied and max(block.repeat) == 1:
        raise cursor.refuse("a block that stands once has no copies to untie", "untied")
    _check_untied(cursor, block)
    return block


def _ratio(cursor: Cursor) -> Ratio:
    given = RATIO_SECTION.read(cursor)
    given["mix"] = tuple(Share.model_validate(part) for part in given["mix"])
    ratio = Ratio.model_validate(given)
    _check_shares(cursor, ratio)
    _check_untied(cursor, ratio)
    return ratio


def _check_untied(cursor: Cursor, piece: Block | Ratio) -> None:
    """Only what is searched inside can differ from copy to copy."""
    slots = [slot for layer in piece.slots for slot in layer.nested]
    fields = {
        name
        for slot in slots
        for option in slot.options
        for name, values in option.fields.items()
        if len(values) > 1
    }
    searched = [*([MIXER] if any(len(s.options) > 1 for s in slots) else []), *sorted(fields)]
    unknown = [i for i, name in enumerate(piece.untied) if name not in searched]
    for i in unknown:
        name = piece.untied[i]
        said = f"found '{name}', which nothing in here searches; searched: "
        cursor.refuse(
            f"{said}{', '.join(searched) or 'nothing'}{nearest(name, searched)}", "untied", i
        )
    if unknown:
        raise Rejected


def _check_shares(cursor: Cursor, ratio: Ratio) -> None:
    """Every share must be possible at some depth, and unlike the others there."""
    least = {of: [layers_of(min(part.share), of) for part in ratio.mix] for of in ratio.of}
    for of in ratio.of:
        if sum(least[of]) > of:
            said = f"the smallest shares are {sum(least[of])} of {of} layers; expected at most {of}"
            raise cursor.refuse(said, "mix", at_key=True)
    complete = True
    for index, part in enumerate(ratio.mix):
        others = {of: sum(least[of]) - least[of][index] for of in ratio.of}
        for said in filter(None, (_idle(part, share, others) for share in part.share)):
            cursor.refuse(said, "mix", index, "share")
            complete = False
    if not complete:
        raise Rejected


def _idle(part: Share, share: float, others: dict[int, int]) -> str:
    """Why a share makes no difference; empty if it does. `others`: by depth, what others need."""
    depths = " or ".join(map(str, others))
    shown = Fraction(share).limit_denominator(10_000)
    numbers = [layers_of(share, of) for of in others]
    if share and not any(numbers):
        return f"a share of {shown} is no layer of {depths}; expected 0 or at least half a layer"
    if all(number + need > of for number, (of, need) in zip(numbers, others.items(), strict=True)):
        return f"a share of {shown} leaves too few of {depths} layers for the other shares"
    for other in part.share[: part.share.index(share)]:
        if numbers == [layers_of(other, of) for of in others]:
            same = Fraction(other).limit_denominator(10_000)
            number = " or ".join(map(str, numbers))
            return f"shares of {same} and of {shown} are both {number} of {depths} layers"
    return ""


def placed_slots(pieces: Sequence[Piece], route: Route) -> Iterator[tuple[Route, Slot]]:
    """Every layer that a stack names, with the way to it in the file."""
    for index, piece in enumerate(pieces):
        here: Route = (*route, index)
        if isinstance(piece, Block):
            yield from placed_slots(piece.layers, (*here, "layers"))
        elif isinstance(piece, Ratio):
            for i, part in enumerate(piece.mix):
                yield (*here, RATIO, "mix", i, "layer"), part.layer
            yield (*here, RATIO, "rest"), piece.rest
        else:
            yield here, piece


def check_ties(cursor: Cursor, pieces: Sequence[Piece]) -> bool:
    """Note every tie that joins nothing, or layers that are not alike; True if there is none."""
    tied: dict[str, list[tuple[Route, Slot]]] = defaultdict(list)
    for route, slot in placed_slots(pieces, ()):
        if slot.tie:
            tied[slot.tie].append((route, slot))
    before = len(cursor.problems)
    for name, layers in tied.items():
        first, slot = layers[0]
        if len(layers) == 1:
            others = [other for other in tied if other != name]
            said = f"no other layer is tied as '{name}'{nearest(name, others)}"
            cursor.refuse(said, *first, TIE, at_key=True)
        elif not slot.is_open:
            cursor.refuse("nothing is searched here, so there is nothing to tie", *first, TIE)
        for route, other in layers[1:]:
            if other != slot:
                said = f"layers tied as '{name}' are written alike; this one differs from the first"
                cursor.refuse(f"{said}: write it as an alias of that", *route)
    return len(cursor.problems) == before
