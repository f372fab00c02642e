"""The `model` section of a study: width, layers, repeat and channel mixer become a ModelSpec.

A layer is a mixer's name (its defaults), `{mixer: {field: narrowing}}` (the listed fields are fixed
or searched), or `{one_of: [...]}` (a bare name is searched over its declared ranges; `none` leaves
the layer out). Asks the registry which mixers there are; knows nothing of tasks or training.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import get_args

from archsearch.arch import NO_MIXER, ChannelSpec
from archsearch.errors import FOREIGN_FAULTS, InfeasibleError, PluginError, nearest
from archsearch.registry import channel_mixer_names, make_config, mixer_fields, mixer_names
from archsearch.space import Field, Value
from archsearch.spec import ChannelOption, ModelSpec, Norm, Option, Slot
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
DEFAULT_WIDTH = 64
DEFAULT_RATIO = 4.0
MAX_LAYERS = 256
_MAX_WIDTH = 1 << 16
_MAX_TRIES = 5000

_LAYER = "a mixer's name, {mixer: {field: value}}, or {one_of: [...]}"
_ALTERNATIVE = f"a mixer's name, {{mixer: {{field: value}}}}, or {NONE}"
_CHANNEL = f"{NONE}, a channel mixer's name, {{swiglu: {{ratio: 4}}}}, or {{one_of: [...]}}"
_RATIOS = one_or_list(number("a ratio above 0", above=0))
CHANNEL = section((Key("ratio", _RATIOS, "Inner width over model width; 4 if not given."),))


def _layers(cursor: Cursor) -> tuple[Slot, ...]:
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of layers in order of depth, each {_LAYER}")
    if len(cursor.value) > MAX_LAYERS:
        raise cursor.refuse(f"{len(cursor.value)} layers; at most {MAX_LAYERS}")
    return items(cursor, _slot, distinct=False)


def _slot(cursor: Cursor) -> Slot:
    value = cursor.value
    if isinstance(value, dict) and ONE_OF in value:
        if not check_keys(cursor, value, (ONE_OF,)):
            raise Rejected
        return Slot(options=_alternatives(cursor.at(ONE_OF)))
    if value == NONE:
        raise cursor.refuse(f"'{NONE}' is an alternative of a {ONE_OF}; leave the layer out here")
    return Slot(options=(_option(cursor, _LAYER, searched=False),))


def _alternatives(cursor: Cursor) -> tuple[Option, ...]:
    if not isinstance(cursor.value, list) or not cursor.value:
        raise cursor.expected(f"a list of alternatives, each {_ALTERNATIVE}")
    options = items(cursor, lambda item: _option(item, _ALTERNATIVE, searched=True), distinct=False)
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


def _option(cursor: Cursor, accepts: str, searched: bool) -> Option:
    """Read one mixer. `searched`: fields that are not listed keep their declared ranges."""
    value = cursor.value
    if value == NONE:
        return Option(mixer=NO_MIXER)
    if isinstance(value, str):
        fields = _fields_of(cursor, value)
        return Option(mixer=value, fields=_declared(fields) if searched else {})
    if not isinstance(value, dict):
        raise cursor.expected(accepts)
    if len(value) != 1:
        hint = "; indent the fields below their mixer" if {*value} & {*mixer_names()} else ""
        raise cursor.expected(accepts, hint)
    (name,) = value
    inner = cursor.at(name)
    fields = _fields_of(cursor, name, name)
    narrowed = _narrowed(inner, name, fields)
    chosen = {**_declared(fields), **narrowed} if searched else narrowed
    return Option(mixer=name, fields={field: chosen[field] for field in fields if field in chosen})


def _declared(fields: Mapping[str, Field]) -> dict[str, tuple[Value, ...]]:
    return {name: field.candidates for name, field in fields.items() if field.domain is not None}


def _narrowed(
    cursor: Cursor, mixer: str, fields: Mapping[str, Field]
) -> dict[str, tuple[Value, ...]]:
    given = {} if cursor.value is None else cursor.value
    if not isinstance(given, dict):
        raise cursor.expected(f"a mapping of fields of '{mixer}': {', '.join(fields) or 'none'}")
    complete = check_keys(cursor, given, [*fields])
    found: dict[str, tuple[Value, ...]] = {}
    for name in given:
        if name in fields:
            try:
                found[name] = candidates(cursor.at(name), fields[name])
            except Rejected:
                complete = False
    if not complete:
        raise Rejected
    return found


def _fields_of(cursor: Cursor, name: str, *below: str) -> Mapping[str, Field]:
    names = mixer_names()
    if name not in names:
        others = [*names, ONE_OF, NONE]
        said = f"no mixer '{name}'; installed: {', '.join(names)}{nearest(name, others)}"
        raise cursor.refuse(said, *below, at_key=True)
    try:
        return mixer_fields(name)
    except PluginError as error:
        raise cursor.refuse(str(error), *below, at_key=True) from error


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
    for index, slot in enumerate(model.layers):
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
    for tried, (mixer, width, values) in enumerate(_choices(widths, slot)):
        if mixer == NO_MIXER or tried >= _MAX_TRIES:
            return ""
        try:
            make_config(mixer, width, values)
        except InfeasibleError as error:
            first = first or f"{error} (width {width})"
        except FOREIGN_FAULTS as error:  # a plugin's own rule may raise anything
            return f"mixer '{mixer}' raised {error!r} at width {width}"
        else:
            return ""
    return first


def _choices(widths: tuple[int, ...], slot: Slot) -> Iterator[tuple[str, int, dict[str, Value]]]:
    for option in slot.options:
        for values in itertools.product(*option.fields.values()):
            for width in widths:
                yield option.mixer, width, dict(zip(option.fields, values, strict=True))
