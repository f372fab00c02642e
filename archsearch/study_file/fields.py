"""How a study narrows one field of a mixer: a value, a list, or `{from, to, step}`.

The mixer declares the type of a field and the range a search may use; a study can only stay inside
it. Knows nothing of mixers beyond their fields, and nothing of layers.
"""

import math
from typing import Any, cast

from archsearch.errors import nearest
from archsearch.space import Choice, Field, Range, Value
from archsearch.study_file.grammar import (
    Cursor,
    Key,
    Kind,
    Rejected,
    Schema,
    choice,
    items,
    section,
    whole,
)

MAX_CANDIDATES = 4096
"""Longest list that `{from, to, step}` may stand for."""

_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}

MAX_INTEGER = 2**20
"""Largest size of an integer that no range is declared for: a rank, a length, a number of heads."""

_ANY_INTEGER: Kind[int] = whole(minimum=-(2**31), maximum=2**31)
_RANGE = section(
    (
        Key("from", _ANY_INTEGER, "First value.", required=True),
        Key("to", _ANY_INTEGER, "Last value, included if the steps reach it.", required=True),
        Key("step", whole(), "Distance of two values; 1 if not given, and never log2."),
        Key(
            "scale",
            choice(("linear", "log2")),
            "log2 doubles, linear steps. log2 if the mixer's own values double, else linear.",
        ),
    )
)


def candidates(cursor: Cursor, field: Field) -> tuple[Value, ...]:
    """Read what a study allows for a field; numbers are sorted. Raises Rejected."""
    value = cursor.value
    if isinstance(value, dict):
        return _from_to(cursor, field)
    if not isinstance(value, list):
        return (_value(cursor, field),)
    if not value:
        raise cursor.expected(f"at least one value of '{field.name}'")
    found = items(cursor, lambda item: _value(item, field), distinct=True)
    if any(isinstance(each, str) for each in found):
        return found
    return tuple(sorted(found, key=lambda each: cast(float, each)))


def accepted(field: Field) -> str:
    """Say what one value of a field may be."""
    domain = field.domain
    if isinstance(domain, Choice) and field.type in (str, bool):
        return f"one of {', '.join(describe_value(value) for value in domain.values)}"
    low, high = bounds(field)
    name = _TYPE_NAMES[field.type]
    if domain is None:
        return f"{name} of up to {MAX_INTEGER}" if field.type is int else name
    return f"{name} from {low:g} to {high:g}, the declared range"


def describe_value(value: Value) -> str:
    """Write a value as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def bounds(field: Field) -> tuple[float, float]:
    """Smallest and largest value of a field of numbers, whether declared or not."""
    if isinstance(field.domain, Range):
        return field.domain.low, field.domain.high
    if field.domain is None and field.type is int:
        return -MAX_INTEGER, MAX_INTEGER
    if field.domain is None or field.type in (str, bool):
        return -math.inf, math.inf
    numbers = [float(value) for value in field.domain.values]
    return min(numbers), max(numbers)


def _value(cursor: Cursor, field: Field) -> Value:
    value = field.named(_typed(cursor, field))
    low, high = bounds(field)
    outside = not isinstance(value, str) and not low <= value <= high
    names = field.domain.values if isinstance(field.domain, Choice) else ()
    if outside or (isinstance(value, str | bool) and names and value not in names):
        hint = nearest(value, [str(name) for name in names]) if isinstance(value, str) else ""
        raise cursor.expected(f"{accepted(field)} of '{field.name}'", hint)
    return value


def _typed(cursor: Cursor, field: Field) -> Value:
    """Read one value of the field's type; 16.0 is an integer, 4 is a number."""
    value = cursor.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and field.type is float and math.isfinite(cast(float, value)):
        return float(cast(float, value))
    if is_number and field.type is int and float(cast(float, value)).is_integer():
        return int(cast(float, value))
    if type(value) is field.type and field.type in (bool, str):
        return cast(Value, value)
    raise cursor.expected(f"{accepted(field)} for '{field.name}'")


def _from_to(cursor: Cursor, field: Field) -> tuple[Value, ...]:
    if field.type is not int:
        raise cursor.expected(
            f"{accepted(field)} for '{field.name}', or a list; from-to is for integers"
        )
    given: dict[str, Any] = _RANGE.read(cursor)
    usual = "log2" if field.doubles and "step" not in given and given["from"] > 0 else "linear"
    low, high, scale = given["from"], given["to"], given.get("scale", usual)
    if low > high:
        raise cursor.refuse(f"an empty range, from {low} to {high}; 'from' is the smaller one")
    if scale == "log2" and "step" in given:
        raise cursor.refuse("a log2 range doubles; leave 'step' out", "step", at_key=True)
    if scale == "log2" and low < 1:
        raise cursor.refuse(f"a log2 range starts at {low}; it must start at 1 or more", "from")
    step = given.get("step", 1)
    count = (high - low) // step + 1
    if scale == "linear" and count > MAX_CANDIDATES:
        raise cursor.refuse(
            f"{count} values from {low} to {high}; at most {MAX_CANDIDATES}: "
            "give a larger 'step', or 'scale: log2'"
        )
    least, most = bounds(field)
    outside = [name for name in ("from", "to") if not least <= given[name] <= most]
    for name in outside:
        cursor.at(name).expected(f"{accepted(field)} of '{field.name}'")
    if outside:
        raise Rejected
    return Range(low, high, step, scale).values


def field_schema(field: Field) -> Schema:
    """JSON Schema of a field as a study narrows it, with its documentation."""
    one: Schema = {"type": _JSON_TYPES[field.type]}
    domain = field.domain
    if isinstance(domain, Choice) and field.type in (str, bool):
        one = {"enum": [*domain.values, *domain.aliases]}
    elif domain is not None or field.type is int:
        low, high = bounds(field)
        one |= {"minimum": low, "maximum": high}
    forms = [one, {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}]
    if field.type is int:
        forms.append(_RANGE.schema)
    searched = "" if domain is None else f" Searched over {_written(field)}."
    doc = f"{field.doc} Default {describe_value(field.default)}.{searched}".strip()
    return {"description": doc, "anyOf": forms}


def _written(field: Field) -> str:
    values = [describe_value(value) for value in field.candidates]
    return ", ".join(values if len(values) <= 8 else [*values[:3], "...", values[-1]])
