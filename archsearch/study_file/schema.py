"""The grammar of a study as a JSON Schema (2020-12), for editors that complete and check YAML.

Made from the same tables as the reader, and from the installed mixers and their fields. What spans
several keys (limits that exclude everything, room for the pairs of a task) only the reader checks.
"""

import copy
from collections.abc import Sequence
from typing import Any

from archsearch.registry import (
    channel_mixer_names,
    default_parts,
    load_mixer,
    mixer_fields,
    mixer_names,
)
from archsearch.study_file.fields import field_schema
from archsearch.study_file.grammar import NONE, Kind, Schema
from archsearch.study_file.mixers import ONE_OF, PARTS, RATIO, REPEAT, TIE, TIE_NAME
from archsearch.study_file.model import CHANNEL
from archsearch.study_file.reading import STUDY
from archsearch.study_file.stack import BLOCK_SECTION, PART_SECTION, RATIO_SECTION

_DEFINED = (
    *("layers", "layer", "alternative", "mixed", "ratio"),
    *("mixer", "tied_mixer", "part", "plain_mixer"),
)
_WORDS = (ONE_OF, NONE, REPEAT, RATIO, TIE)
"""What means something else than a mixer, where a mixer's name stands."""

_TIE: Schema = {
    "description": "Layers with one tie choose together; they are written alike.",
    **TIE_NAME.schema,
}


def study_schema() -> Schema:
    """Return the JSON Schema (2020-12) of a study as it is written, with the installed mixers.

    A study with `plugins` may use mixers that the schema does not list.
    """
    properties = {**STUDY.schema["properties"], "model": True}
    described = STUDY.schema["properties"]["model"]
    with_own = copy.deepcopy(described)
    with_own["properties"]["layers"]["$ref"] = "#/$defs/open_layers"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "archsearch study",
        **STUDY.schema,
        "properties": properties,
        "if": {"required": ["plugins"]},
        "then": {"properties": {"model": with_own}},
        "else": {"properties": {"model": described}},
        "$defs": {
            **_layer_definitions("", closed=True),
            **_layer_definitions("open_", closed=False),
            "channel_mixer": _channel_definition(),
        },
    }


def _layer_definitions(prefix: str, closed: bool) -> dict[str, Schema]:
    """JSON Schema definitions of layers and of parts of mixers, named `prefix` + layer, part, ...

    `closed` accepts the installed mixers alone; open ones are for studies that bring their own.
    """
    names = mixer_names()
    plain = [name for name in names if not default_parts(name)]
    reference = {name: {"$ref": f"#/$defs/{prefix}{name}"} for name in _DEFINED}
    mixer = {"anyOf": [_named(names, closed), reference["mixer"]]}
    part = {"anyOf": [_named(plain, closed), reference["plain_mixer"]]}
    tied = reference["tied_mixer"]
    schemas: dict[str, Schema] = {
        "layers": {"type": "array", "items": reference["layer"], "minItems": 1},
        "layer": {
            "anyOf": [
                *mixer["anyOf"],
                tied,
                _one_of(reference["alternative"], can_tie=True),
                _with(BLOCK_SECTION, layers=reference["layers"]),
                {
                    "type": "object",
                    "properties": {RATIO: reference["ratio"]},
                    "required": [RATIO],
                    "additionalProperties": False,
                },
            ]
        },
        "alternative": {"anyOf": [*mixer["anyOf"], {"const": NONE}]},
        "mixed": {"anyOf": [*mixer["anyOf"], tied, _one_of(mixer, can_tie=True)]},
        "ratio": _ratio(reference["mixed"]),
        "mixer": _written(names, closed, reference["part"]),
        "tied_mixer": _written(names, closed, reference["part"], tied=True),
        "part": {"anyOf": [part, _one_of(part)]},
        "plain_mixer": _written(plain, closed, reference["part"]),
    }
    return {f"{prefix}{name}": schema for name, schema in schemas.items()}


def _with(kind: Kind[Any], **properties: Schema) -> Schema:
    """The schema of a section, some keys of which refer to a definition; they keep their text."""
    schema = copy.deepcopy(kind.schema)
    for name, reference in properties.items():
        described = schema["properties"][name]
        schema["properties"][name] = {"description": described["description"], **reference}
    return schema


def _ratio(mixed: Schema) -> Schema:
    schema = _with(RATIO_SECTION, rest=mixed)
    schema["properties"]["mix"]["items"] = _with(PART_SECTION, layer=mixed)
    return schema


def _one_of(alternative: Schema, can_tie: bool = False) -> Schema:
    alternatives = {"type": "array", "items": alternative, "minItems": 1}
    return {
        "type": "object",
        "properties": {ONE_OF: alternatives} | ({TIE: _TIE} if can_tie else {}),
        "required": [ONE_OF],
        "additionalProperties": False,
    }


def _named(names: Sequence[str], closed: bool) -> Schema:
    """A mixer by its name alone."""
    named: list[Schema] = [{"const": name, "description": _doc_of(name)} for name in names]
    own: Schema = {"type": "string", "not": {"enum": _reserved(names)}}
    return {"anyOf": [*named, *([] if closed else [own])]}


def _reserved(names: Sequence[str]) -> list[str]:
    """What cannot be the name of a mixer of the study's own, or be one of `names`."""
    return [*_WORDS, *(name for name in mixer_names() if name not in names)]


def _written(names: Sequence[str], closed: bool, part: Schema, tied: bool = False) -> Schema:
    """A mixer with its fields; a tied one has its tie beside it."""
    reserved = [name for name in _reserved(names) if not (tied and name == TIE)]
    return {
        "type": "object",
        "properties": {
            **{name: _mixer_schema(name, part) for name in names},
            **({TIE: _TIE} if tied else {}),
        },
        "required": [TIE] if tied else [],
        "additionalProperties": False if closed else {"type": ["object", "null"]},
        "propertyNames": {"not": {"enum": reserved}},
        "minProperties": 1 + tied,
        "maxProperties": 1 + tied,
    }


def _channel_definition() -> Schema:
    names = channel_mixer_names()
    written = {
        "type": "object",
        "properties": dict.fromkeys(names, CHANNEL.schema),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    one: Schema = {"anyOf": [{"enum": [NONE, *names]}, written]}
    return {"anyOf": [one, _one_of(one)]}


def _doc_of(name: str) -> str:
    """First line of what a mixer says of itself."""
    return (load_mixer(name).__doc__ or name).strip().splitlines()[0]


def _mixer_schema(name: str, part: Schema) -> Schema:
    properties = {key: field_schema(field) for key, field in mixer_fields(name).items()}
    if usual := default_parts(name):
        listed = ", ".join(one.mixer for one in usual)
        said = f"The mixers that it is made of. Default {listed}."
        parts = {"description": said, "type": "array", "items": part, "minItems": 2}
        properties = {PARTS: parts, **properties}
    return {
        "description": _doc_of(name),
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }
