"""One layer of a study: a mixer's name, a narrowed mixer, or one of several.

A bare name is a mixer with its defaults, `{mixer: {field: narrowing}}` fixes or searches the listed
fields, and in `{one_of: [...]}` a bare name is searched over its declared ranges, and `none` leaves
the layer out. A mixer that is made of mixers may list its `parts`, each written as a layer is; they
have no parts themselves and are never left out. Layers of one `tie` choose together. Asks the
registry which mixers there are; knows nothing of how layers are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from archsearch.arch import NO_MIXER
from archsearch.errors import PluginError, nearest
from archsearch.model_spec import Option, Slot
from archsearch.registry import default_parts, mixer_fields, mixer_names
from archsearch.space import Field, Value
from archsearch.study_file.fields import candidates
from archsearch.study_file.grammar import NONE, Cursor, Rejected, check_keys, describe, items, text

ONE_OF = "one_of"
PARTS = "parts"
TIE = "tie"
REPEAT, RATIO = "repeat", "ratio"
"""What makes an item of a list of layers something else than one layer."""

TIE_NAME = text("a name of letters, digits, '-' and '_'", r"^[A-Za-z0-9_-]{1,64}$")


@dataclass(frozen=True)
class Place:
    """Where a layer is written, and what it may be there."""

    accepts: str
    alternative: str
    no_none: str = ""
    """Why `none` cannot be an alternative here; empty if it can."""
    is_part: bool = False


_WRITTEN = "a mixer's name, {mixer: {field: value}}"
IN_STACK = Place(
    f"{_WRITTEN}, {{one_of: [...]}}, {{repeat: 2, layers: [...]}}, or {{ratio: {{...}}}}",
    f"{_WRITTEN}, or {NONE}",
)
IN_RATIO = Place(
    f"{_WRITTEN}, or {{one_of: [...]}}, without {NONE}",
    f"{_WRITTEN}, without {NONE}",
    f"'{NONE}' cannot be in a ratio, which says how many layers there are",
)
IN_MIXER = Place(
    f"{_WRITTEN}, or {{one_of: [...]}}, without parts and {NONE}",
    f"{_WRITTEN}, or {{one_of: [...]}}, without parts and {NONE}",
    f"'{NONE}' cannot be a part; leave the part out of the list",
    is_part=True,
)


def read_slot(cursor: Cursor, place: Place) -> Slot:
    """Read one layer. Raises Rejected."""
    value = cursor.value
    if isinstance(value, dict) and ONE_OF in value:
        if not check_keys(cursor, value, (ONE_OF,) if place.is_part else (ONE_OF, TIE)):
            raise Rejected
        options = _alternatives(cursor.at(ONE_OF), place)
    elif value == NONE and not place.no_none:
        raise cursor.refuse(f"'{NONE}' is an alternative of a {ONE_OF}; leave the layer out here")
    else:
        options = (_option(cursor, place, place.accepts, False),)
    tied = isinstance(value, dict) and TIE in value and not place.is_part
    return Slot(options=options, tie=TIE_NAME.read(cursor.at(TIE)) if tied else "")


def _parts(cursor: Cursor) -> tuple[Slot, ...]:
    if not isinstance(cursor.value, list) or len(cursor.value) < 2:
        raise cursor.expected(f"a list of at least two parts, each {IN_MIXER.accepts}")
    return items(cursor, lambda item: read_slot(item, IN_MIXER), distinct=False)


def _usual_parts(mixer: str) -> tuple[Slot, ...]:
    """The parts of a mixer that lists none."""
    options = (
        Option(mixer=part.mixer, fields={name: (value,) for name, value in part.fields.items()})
        for part in default_parts(mixer)
    )
    return tuple(Slot(options=(option,)) for option in options)


def _alternatives(cursor: Cursor, place: Place) -> tuple[Option, ...]:
    accepts = place.alternative
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of alternatives, each {accepts}")
    options = items(cursor, lambda item: _option(item, place, accepts, True), distinct=False)
    refuse_repeats(cursor, [option.mixer for option in options])
    return options


def refuse_repeats(cursor: Cursor, names: list[str]) -> None:
    """Note every alternative that was there before."""
    repeats = [i for i, name in enumerate(names) if name in names[:i]]
    for i in repeats:
        cursor.refuse(
            f"'{names[i]}' is an alternative already; put its values into one list", i, at_key=True
        )
    if repeats:
        raise Rejected


def _option(cursor: Cursor, place: Place, accepts: str, searched: bool) -> Option:
    """Read one mixer. `searched`: fields that are not listed keep their declared ranges."""
    value = cursor.value
    if value == NONE and place.no_none:
        raise cursor.refuse(place.no_none)
    if value == NONE:
        return Option(mixer=NO_MIXER)
    if value in (REPEAT, RATIO):
        raise cursor.expected(accepts)
    if isinstance(value, str):
        fields = _fields_of(cursor, value, place)
        declared = _declared(fields) if searched else {}
        return Option(mixer=value, fields=declared, parts=_usual_parts(value))
    name = _name_of(cursor, place, accepts, searched)
    inner = cursor.at(name)
    fields = _fields_of(cursor, name, place, name)
    narrowed, parts = _narrowed(inner, name, fields)
    chosen = {**_declared(fields), **narrowed} if searched else narrowed
    ordered = {field: chosen[field] for field in fields if field in chosen}
    return Option(mixer=name, fields=ordered, parts=parts)


def _name_of(cursor: Cursor, place: Place, accepts: str, searched: bool) -> str:
    """The mixer of a mapping that narrows one; beside it there may be the layer's tie."""
    value = cursor.value
    if not isinstance(value, dict):
        raise cursor.expected(accepts)
    stacked = [name for name in (REPEAT, RATIO) if name in value]
    if stacked and place is IN_STACK and not searched:
        others = ", ".join(name for name in value if name not in stacked)
        raise cursor.refuse(f"found {others} beside '{stacked[0]}'; write it inside of that")
    if stacked:
        raise cursor.refuse(f"'{stacked[0]}' is an item of `layers` alone; expected {accepts}")
    if [*value] == ["layers"]:
        raise cursor.refuse(f"a group of layers says how often it comes; expected {accepts}")
    if TIE in value and searched:
        raise cursor.refuse(f"'{TIE}' is written beside '{ONE_OF}', once for all", TIE, at_key=True)
    names = [name for name in value if name != TIE or place.is_part]
    if len(names) != 1:
        hint = next(filter(None, (nearest(name, (ONE_OF, REPEAT, RATIO)) for name in names)), "")
        if {*names} & {*mixer_names()}:
            hint = "; indent the fields below their mixer"
        raise cursor.expected(accepts, hint)
    return names[0]


def _declared(fields: Mapping[str, Field]) -> dict[str, tuple[Value, ...]]:
    return {name: field.candidates for name, field in fields.items() if field.domain is not None}


def _narrowed(
    cursor: Cursor, mixer: str, fields: Mapping[str, Field]
) -> tuple[dict[str, tuple[Value, ...]], tuple[Slot, ...]]:
    """Read what a study says of a mixer: candidates of the listed fields, and its parts."""
    given = {} if cursor.value is None else cursor.value
    parts = _usual_parts(mixer)
    names = [*fields, *([PARTS] if parts else [])]
    if not isinstance(given, dict):
        raise cursor.expected(f"a mapping of fields of '{mixer}': {', '.join(names) or 'none'}")
    complete = check_keys(cursor, given, names)
    found: dict[str, tuple[Value, ...]] = {}
    for name in given:
        try:
            if name in fields:
                found[name] = candidates(cursor.at(name), fields[name])
            elif name in names:
                parts = _parts(cursor.at(name))
        except Rejected:
            complete = False
    if not complete:
        raise Rejected
    return found, parts


def _fields_of(cursor: Cursor, name: str, place: Place, *below: str) -> Mapping[str, Field]:
    names = mixer_names()
    if name not in names:
        others = [*names, ONE_OF, NONE, REPEAT, RATIO]
        if name == ONE_OF:
            said = f"a {ONE_OF} has no {ONE_OF} in it; list all alternatives in one"
        else:
            said = (
                f"no mixer {describe(name)}; installed: {', '.join(names)}{nearest(name, others)}"
            )
        raise cursor.refuse(said, *below, at_key=True)
    try:
        fields, is_composite = mixer_fields(name), bool(default_parts(name))
    except PluginError as error:
        raise cursor.refuse(str(error), *below, at_key=True) from error
    if place.is_part and is_composite:
        said = f"found '{name}', which has parts itself; expected a mixer that has none"
        raise cursor.refuse(said, *below, at_key=True)
    return fields
