"""The grammar of a study as a JSON Schema (2020-12), for editors that complete and check YAML.

Made from the same tables as the reader, and from the installed mixers and their fields. What spans
several keys (limits that exclude everything, room for the pairs of a task) only the reader checks.
"""

import copy

from archsearch.registry import channel_mixer_names, load_mixer, mixer_fields, mixer_names
from archsearch.study_file.fields import field_schema
from archsearch.study_file.grammar import NONE, Schema
from archsearch.study_file.model import CHANNEL, ONE_OF, one_of_schema
from archsearch.study_file.reading import STUDY

_PARTS = ("layers", "layer", "alternative", "mixer")


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
    """JSON Schema definitions of layers, named `prefix` + layers, layer, alternative, mixer.

    `closed` accepts the installed mixers alone; open ones are for studies that bring their own.
    """
    names = mixer_names()
    named: list[Schema] = [{"const": name, "description": _doc_of(name)} for name in names]
    named += [] if closed else [{"type": "string"}]
    reference = {part: {"$ref": f"#/$defs/{prefix}{part}"} for part in _PARTS}
    mixer = {
        "type": "object",
        "properties": {name: _mixer_schema(name) for name in names},
        "additionalProperties": False if closed else {"type": ["object", "null"]},
        "propertyNames": {"not": {"enum": [ONE_OF, NONE]}},
        "minProperties": 1,
        "maxProperties": 1,
    }
    schemas: dict[str, Schema] = {
        "layers": {"type": "array", "items": reference["layer"], "minItems": 1},
        "layer": {
            "anyOf": [
                {"anyOf": named, "not": {"const": NONE}},
                reference["mixer"],
                one_of_schema(reference["alternative"]),
            ]
        },
        "alternative": {"anyOf": [*named, {"const": NONE}, reference["mixer"]]},
        "mixer": mixer,
    }
    return {f"{prefix}{part}": schema for part, schema in schemas.items()}


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
    return {"anyOf": [one, one_of_schema(one)]}


def _doc_of(name: str) -> str:
    """First line of what a mixer says of itself."""
    return (load_mixer(name).__doc__ or name).strip().splitlines()[0]


def _mixer_schema(name: str) -> Schema:
    return {
        "description": _doc_of(name),
        "type": ["object", "null"],
        "properties": {key: field_schema(field) for key, field in mixer_fields(name).items()},
        "additionalProperties": False,
    }
