"""The `model` section of a study: width, layers, repeat and channel mixer become a ModelSpec.

A layer is a mixer's name (its defaults), `{mixer: {field: narrowing}}` (the listed fields are fixed
or searched), or `{one_of: [...]}` (a bare name is searched over its declared ranges; `none` leaves
the layer out). A mixer that is made of mixers may list its `parts`, each written as a layer is;
they have no parts themselves and are never left out. Asks the registry which mixers there are;
knows nothing of tasks or training.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import get_args

from archsearch.arch import NO_MIXER, ChannelSpec
from archsearch.errors import FOREIGN_FAULTS, InfeasibleError, PluginError, nearest
from archsearch.model_spec import ChannelOption, ModelSpec, Norm, Option, Slot
from archsearch.registry import (
    canonical,
    channel_mixer_names,
    default_parts,
    make_config,
    mixer_fields,
    mixer_names,
)
from archsearch.space import Field, Part, Parts, Value
from archsearch.study_file.fields import candidates
from archsearch.study_file.grammar import (
    NONE,
    Cursor,
    Key,
    Kind,
    Rejected,
    Schema,
    check_keys,
    choice,
    items,
    number,
    one_or_list,
    section,
    switch,
    whole,
)

ONE_OF = "one_of"
PARTS = "parts"
DEFAULT_WIDTH = 64
DEFAULT_RATIO = 4.0
MAX_LAYERS = 256
_MAX_WIDTH = 1 << 16
_MAX_TRIES = 5000

_LAYER = "a mixer's name, {mixer: {field: value}}, or {one_of: [...]}"
_ALTERNATIVE = f"a mixer's name, {{mixer: {{field: value}}}}, or {NONE}"
_PART = "a mixer's name, {mixer: {field: value}}, or {one_of: [...]}, without parts and none"
_CHANNEL = f"{NONE}, a channel mixer's name, {{swiglu: {{ratio: 4}}}}, or {{one_of: [...]}}"
_RATIOS = one_or_list(number("a ratio above 0", above=0))
CHANNEL = section((Key("ratio", _RATIOS, "Inner width over model width; 4 if not given."),))


def _layers(cursor: Cursor) -> tuple[Slot, ...]:
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of layers in order of depth, each {_LAYER}")
    if len(cursor.value) > MAX_LAYERS:
        raise cursor.refuse(f"{len(cursor.value)} layers; at most {MAX_LAYERS}")
    return items(cursor, _slot, distinct=False)


def _slot(cursor: Cursor, is_part: bool = False) -> Slot:
    value = cursor.value
    if isinstance(value, dict) and ONE_OF in value:
        if not check_keys(cursor, value, (ONE_OF,)):
            raise Rejected
        return Slot(options=_alternatives(cursor.at(ONE_OF), is_part))
    if value == NONE and not is_part:
        raise cursor.refuse(f"'{NONE}' is an alternative of a {ONE_OF}; leave the layer out here")
    return Slot(options=(_option(cursor, _PART if is_part else _LAYER, False, is_part),))


def _parts(cursor: Cursor) -> tuple[Slot, ...]:
    if not isinstance(cursor.value, list) or len(cursor.value) < 2:
        raise cursor.expected(f"a list of at least two parts, each {_PART}")
    return items(cursor, lambda item: _slot(item, is_part=True), distinct=False)


def _usual_parts(mixer: str) -> tuple[Slot, ...]:
    """The parts of a mixer that lists none."""
    options = (
        Option(mixer=part.mixer, fields={name: (value,) for name, value in part.fields.items()})
        for part in default_parts(mixer)
    )
    return tuple(Slot(options=(option,)) for option in options)


def _alternatives(cursor: Cursor, is_part: bool) -> tuple[Option, ...]:
    accepts = _PART if is_part else _ALTERNATIVE
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of alternatives, each {accepts}")
    options = items(cursor, lambda item: _option(item, accepts, True, is_part), distinct=False)
    _refuse_repeats(cursor, [option.mixer for option in options])
    return options


def _refuse_repeats(cursor: Cursor, names: list[str]) -> None:
    repeats = [i for i, name in enumerate(names) if name in names[:i]]
    for i in repeats:
        cursor.refuse(
            f"'{names[i]}' is an alternative already; put its values into one list", i, at_key=True
        )
    if repeats:
        raise Rejected


def _option(cursor: Cursor, accepts: str, searched: bool, is_part: bool) -> Option:
    """Read one mixer. `searched`: fields that are not listed keep their declared ranges."""
    value = cursor.value
    if value == NONE and is_part:
        raise cursor.refuse(f"'{NONE}' cannot be a part; leave the part out of the list")
    if value == NONE:
        return Option(mixer=NO_MIXER)
    if isinstance(value, str):
        fields = _fields_of(cursor, value, is_part)
        declared = _declared(fields) if searched else {}
        return Option(mixer=value, fields=declared, parts=_usual_parts(value))
    if not isinstance(value, dict):
        raise cursor.expected(accepts)
    if len(value) != 1:
        hint = "; indent the fields below their mixer" if {*value} & {*mixer_names()} else ""
        raise cursor.expected(accepts, hint)
    (name,) = value
    inner = cursor.at(name)
    fields = _fields_of(cursor, name, is_part, name)
    narrowed, parts = _narrowed(inner, name, fields)
    chosen = {**_declared(fields), **narrowed} if searched else narrowed
    ordered = {field: chosen[field] for field in fields if field in chosen}
    if parts:
        _refuse_idle(inner, name, ordered)
    return Option(mixer=name, fields=ordered, parts=parts)


def _refuse_idle(cursor: Cursor, mixer: str, chosen: Mapping[str, tuple[Value, ...]]) -> None:
    """Note every listed field of a mixer with parts that makes no difference to any choice."""
    given = cursor.value if isinstance(cursor.value, dict) else {}
    defaults = {name: field.default for name, field in mixer_fields(mixer).items()}
    idle = []
    for name in (name for name in chosen if name in given):
        others = {key: values for key, values in chosen.items() if key != name}
        pairs = (
            (canonical(mixer, {**values, name: own}, ()), canonical(mixer, values, ()))
            for one in itertools.product(*others.values())
            for values in [dict(zip(others, one, strict=True))]
            for own in chosen[name]
        )
        if {*chosen[name]} != {defaults[name]} and all(one == other for one, other in pairs):
            idle.append(name)
    for name in idle:
        others = {**{key: (value,) for key, value in defaults.items()}, **chosen}
        said = ", ".join(
            f"{key} {' or '.join(map(str, values))}"
            for key, values in others.items()
            if key != name
        )
        cursor.refuse(f"makes no difference with {said}; leave it out", name, at_key=True)
    if idle:
        raise Rejected


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


def _fields_of(cursor: Cursor, name: str, is_part: bool, *below: str) -> Mapping[str, Field]:
    names = mixer_names()
    if name not in names:
        others = [*names, ONE_OF, NONE]
        said = f"no mixer '{name}'; installed: {', '.join(names)}{nearest(name, others)}"
        raise cursor.refuse(said, *below, at_key=True)
    try:
        fields, is_composite = mixer_fields(name), bool(default_parts(name))
    except PluginError as error:
        raise cursor.refuse(str(error), *below, at_key=True) from error
    if is_part and is_composite:
        said = f"found '{name}', which has parts itself; expected a mixer that has none"
        raise cursor.refuse(said, *below, at_key=True)
    return fields


def _channels(cursor: Cursor) -> tuple[ChannelOption, ...]:
    value = cursor.value
    if not (isinstance(value, dict) and ONE_OF in value):
        return (_channel(cursor),)
    if not check_keys(cursor, value, (ONE_OF,)):
        raise Rejected
    inner = cursor.at(ONE_OF)
    if not isinstance(inner.value, list) or not inner.value:
        raise inner.expected(f"a list of {NONE}, channel mixers, or {{swiglu: {{ratio: 4}}}}")
    options = items(inner, _channel, distinct=False)
    _refuse_repeats(inner, [option.kind for option in options])
    return options


def _channel(cursor: Cursor) -> ChannelOption:
    value = cursor.value
    if value == NONE:
        return ChannelOption()
    name = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
    names = channel_mixer_names()
    if not isinstance(name, str) or name not in names:
        accepts = f"{_CHANNEL}; there are {', '.join(names)}"
        raise cursor.expected(accepts, nearest(name, (*names, NONE, ONE_OF)))
    given = CHANNEL.read(cursor.at(name)) if isinstance(value, dict) else {}
    return ChannelOption(kind=name, ratio=given.get("ratio", (DEFAULT_RATIO,)))


def one_of_schema(alternative: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {ONE_OF: {"type": "array", "items": alternative, "minItems": 1}},
        "required": [ONE_OF],
        "additionalProperties": False,
    }


MODEL = section(
    (
        Key(
            "width",
            one_or_list(whole(maximum=_MAX_WIDTH)),
            f"Features of the residual stream; a list is searched. Default {DEFAULT_WIDTH}.",
        ),
        Key(
            "layers",
            Kind(f"a list of layers, each {_LAYER}", {"$ref": "#/$defs/layers"}, _layers),
            "Mixers in order of depth. A name is fixed; one_of is searched.",
            required=True,
        ),
        Key(
            "repeat",
            one_or_list(whole(maximum=MAX_LAYERS)),
            "How often the whole list of layers stands one after the other. Default 1.",
        ),
        Key(
            "channel_mixer",
            Kind(_CHANNEL, {"$ref": "#/$defs/channel_mixer"}, _channels),
            "What follows every mixer: none (the default), or an MLP.",
        ),
        Key("norm", choice(get_args(Norm)), "Norm before every mixer. Default layernorm."),
        Key("tied_head", switch(), "Whether the head is the embedding once more. Default true."),
    )
)


def read_model(cursor: Cursor) -> ModelSpec:
    """Read the section. Raises Rejected once every problem in it is noted."""
    given = MODEL.read(cursor)
    model = ModelSpec.model_validate({"width": (DEFAULT_WIDTH,), **given})
    complete = True
    if len(model.layers) * max(model.repeat) > MAX_LAYERS:
        depth = len(model.layers) * max(model.repeat)
        cursor.refuse(f"{depth} layers once repeated; at most {MAX_LAYERS}", "repeat")
        complete = False
    for option, ratio in ((one, ratio) for one in model.channel_mixer for ratio in one.ratio):
        try:
            ChannelSpec(kind=option.kind, ratio=ratio).config(min(model.width))
        except InfeasibleError as error:
            cursor.refuse(str(error), "channel_mixer")
            complete = False
    for index, slot in enumerate(model.layer_slots):
        reason = _excluded(model.width, slot)
        if reason:
            cursor.refuse(f"no choice of this layer can be built: {reason}", "layers", index)
            complete = False
    if not complete:
        raise Rejected
    return model


def _excluded(widths: tuple[int, ...], slot: Slot) -> str:
    """Why the mixers' own rules exclude every choice of a slot; empty if they do not."""
    first = ""
    choices = ((part, width) for part in _choices(slot) for width in widths)
    for tried, ((mixer, values, parts), width) in enumerate(choices):
        if mixer == NO_MIXER or tried >= _MAX_TRIES:
            return ""
        try:
            make_config(mixer, width, values, parts)
        except InfeasibleError as error:
            first = first or f"{error} (width {width})"
        except FOREIGN_FAULTS as error:  # a plugin's own rule may raise anything
            return f"mixer '{mixer}' raised {error!r} at width {width}"
        else:
            return ""
    return first


def _choices(slot: Slot) -> Iterator[tuple[str, dict[str, Value], Parts]]:
    for option in slot.options:
        ways = [itertools.islice(_choices(part), _MAX_TRIES) for part in option.parts]
        for own in itertools.product(*option.fields.values()):
            values = dict(zip(option.fields, own, strict=True))
            for parts in itertools.product(*ways):
                yield option.mixer, values, tuple(Part(part[0], part[1]) for part in parts)
