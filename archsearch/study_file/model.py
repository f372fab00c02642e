"""The `model` section of a study: width, layers, repeat and channel mixer become a ModelSpec.

`stack` reads the layers. Here stand the keys around them, and what can only be said of all at once:
how deep the stack is, and whether its layers can be built at any width. Knows nothing of tasks or
training.
"""

import itertools
from collections.abc import Iterator
from functools import reduce
from typing import get_args

from archsearch.arch import NO_MIXER, ChannelSpec
from archsearch.errors import FOREIGN_FAULTS, InfeasibleError, nearest
from archsearch.model_spec import ChannelOption, ModelSpec, Norm, Slot
from archsearch.registry import channel_mixer_names, make_config
from archsearch.space import Part, Parts, Value
from archsearch.study_file.grammar import (
    NONE,
    Cursor,
    Key,
    Kind,
    Rejected,
    check_keys,
    choice,
    items,
    number,
    one_or_list,
    section,
    switch,
    whole,
)
from archsearch.study_file.idle import refuse_idle
from archsearch.study_file.mixers import IN_STACK, ONE_OF, refuse_repeats
from archsearch.study_file.stack import MAX_LAYERS, check_ties, placed_slots, read_layers

DEFAULT_WIDTH = 64
DEFAULT_RATIO = 4.0
_MAX_WIDTH = 1 << 16
_MAX_TRIES = 5000

_CHANNEL = f"{NONE}, a channel mixer's name, {{swiglu: {{ratio: 4}}}}, or {{one_of: [...]}}"
_RATIOS = one_or_list(number("a ratio above 0", above=0))
CHANNEL = section((Key("ratio", _RATIOS, "Inner width over model width; 4 if not given."),))


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
    refuse_repeats(inner, [option.kind for option in options])
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


MODEL = section(
    (
        Key(
            "width",
            one_or_list(whole(maximum=_MAX_WIDTH)),
            f"Features of the residual stream; a list is searched. Default {DEFAULT_WIDTH}.",
        ),
        Key(
            "layers",
            Kind(
                f"a list of layers, each {IN_STACK.accepts}",
                {"$ref": "#/$defs/layers"},
                read_layers,
            ),
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
    once = sum(piece.deepest for piece in model.layers)
    complete = check_ties(cursor.at("layers"), model.layers)
    if once > MAX_LAYERS:
        cursor.refuse(f"{once} layers; at most {MAX_LAYERS}", "layers", at_key=True)
        complete = False
    elif model.deepest > MAX_LAYERS:
        cursor.refuse(f"{model.deepest} layers once repeated; at most {MAX_LAYERS}", "repeat")
        complete = False
    for option, ratio in ((one, ratio) for one in model.channel_mixer for ratio in one.ratio):
        try:
            ChannelSpec(kind=option.kind, ratio=ratio).config(min(model.width))
        except InfeasibleError as error:
            cursor.refuse(str(error), "channel_mixer")
            complete = False
    for route, slot in placed_slots(model.layers, ("layers",)):
        reason = _excluded(model.width, slot)
        if reason:
            cursor.refuse(f"no choice of this layer can be built: {reason}", *route)
        here = reduce(Cursor.at, route, cursor)
        complete = not reason and refuse_idle(here, slot, model.width) and complete
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
