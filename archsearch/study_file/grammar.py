"""The words of a study's grammar: what a value may be, how it is read, refused and described.

A `Kind` reads one value and carries the JSON Schema of what it accepts, so that the reader and the
schema for editors cannot drift apart. Reading notes every problem at its line and goes on.
Knows no key of a study; its sister modules spell those.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeGuard, TypeVar

from archsearch import units
from archsearch.errors import Problem, nearest
from archsearch.yaml_file import Data, Document, Position, Route, dotted

T = TypeVar("T")
Schema = dict[str, Any]

NONE = "none"
"""How a study writes that something is left out."""


class Rejected(Exception):  # noqa: N818 - a signal; the user's error is the noted problem
    """A value was refused, and the problem is noted already."""


@dataclass(frozen=True)
class Cursor:
    """One value of the file and the way to it; `problems` is shared by the whole file."""

    document: Document
    route: Route
    value: Data
    problems: list[Problem] = field(default_factory=list)

    def at(self, step: str | int) -> "Cursor":
        """Go down to an entry or item, which must exist."""
        inner: Any = self.value
        return Cursor(self.document, (*self.route, step), inner[step], self.problems)

    def refuse(self, message: str, *below: str | int, at_key: bool = False) -> Rejected:
        """Note a problem with this value, or with one `below` it that may be missing."""
        route = (*self.route, *below)
        at = position(self.document, route, at_key)
        where = shown(dotted(route)) or "study"
        self.problems.append(Problem(at.line, at.column, where, shown(message)))
        return Rejected()

    def expected(self, accepts: str, hint: str = "") -> Rejected:
        """Note that something else was found here."""
        return self.refuse(f"found {describe(self.value)}; expected {accepts}{hint}")


def shown(text: str) -> str:
    """Text as one line, in which what cannot be seen is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def position(document: Document, route: Route, at_key: bool = False) -> Position:
    """Where to point for a value: its start, or its key if `at_key` or if that is another line.

    For a value that does not exist, the nearest one around it.
    """
    while route not in document.values:
        route, at_key = route[:-1], True
    key, value = document.keys.get(route), document.values[route]
    return key if key is not None and (at_key or key.line != value.line) else value


def describe(value: Data) -> str:
    """Name a value in an error."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {len(value)}"
    if isinstance(value, dict):
        shown = [*value][:4] + ["..."] * (len(value) > 4)
        return f"a mapping of {', '.join(shown)}" if value else "an empty mapping"
    return str(value)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a value may be. `read` returns it or notes a problem and raises Rejected."""

    accepts: str
    schema: Schema
    read: Callable[[Cursor], T]


@dataclass(frozen=True)
class Scalar(Kind[T]):
    """A kind of one plain value. `parse` raises ValueError, with a hint or without."""

    parse: Callable[[Data], T]


def scalar(accepts: str, schema: Schema, parse: Callable[[Data], T]) -> Scalar[T]:
    """Make a kind of one plain value, whose `read` notes what `parse` refuses."""

    def read(cursor: Cursor) -> T:
        try:
            return parse(cursor.value)
        except ValueError as error:
            hint = str(error)
            if hint and not hint.startswith(";"):
                hint = f" ({hint})"
            raise cursor.expected(accepts, hint) from error

    return Scalar(accepts, schema, read, parse)


def whole(minimum: int = 1, maximum: int | None = None) -> Scalar[int]:
    """An integer, also written with a unit, such as `100k`."""
    return _quantity(
        _bounded("an integer", minimum, maximum) + ", such as 64 or 2k",
        units.parse_count,
        units.COUNT_PATTERN,
        minimum,
        maximum,
    )


def byte_count(minimum: int = 1) -> Scalar[int]:
    """A number of bytes."""
    accepts = f"{_bounded('bytes', minimum, None)}, such as 4096, 512KiB or 1MB"
    return _quantity(accepts, units.parse_bytes, units.BYTES_PATTERN, minimum, None)


def _bounded(what: str, minimum: float, maximum: float | None) -> str:
    return (
        f"{what}, {minimum} or more" if maximum is None else f"{what} from {minimum} to {maximum}"
    )


def _quantity(
    accepts: str,
    parse_text: Callable[[str], int],
    pattern: str,
    minimum: int,
    maximum: int | None,
) -> Scalar[int]:
    def parse(value: Data) -> int:
        if isinstance(value, str):
            value = parse_text(value)
        if not is_whole(value) or value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return int(value)

    bounds = {"minimum": minimum} | ({} if maximum is None else {"maximum": maximum})
    schema = {"anyOf": [{"type": "integer", **bounds}, {"type": "string", "pattern": pattern}]}
    return scalar(accepts, schema, parse)


def is_whole(value: Data) -> TypeGuard[int | float]:
    """True for an integer, also if it is written like 2e6."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def number(
    accepts: str, minimum: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> Scalar[float]:
    """A finite number with `minimum <= x`, `above < x` and `x < below`."""

    def parse(value: Data) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not math.isfinite(value) or value < minimum or not above < value < below:
            raise ValueError
        return float(value)

    bounds = {"minimum": minimum, "exclusiveMinimum": above, "exclusiveMaximum": below}
    finite = {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    return scalar(accepts, {"type": "number", **finite}, parse)


def duration() -> Scalar[float]:
    """A time, in seconds once read."""

    def parse(value: Data) -> float:
        if not isinstance(value, str):
            raise ValueError
        return units.parse_duration(value)

    accepts = "a duration with its unit, such as 90s, 30m or 1h30m"
    return scalar(accepts, {"type": "string", "pattern": units.DURATION_PATTERN}, parse)


def text(accepts: str, pattern: str = r"\S") -> Scalar[str]:
    """Text in which `pattern` is found, without space around it."""

    def parse(value: Data) -> str:
        if not isinstance(value, str):
            raise ValueError("" if value is None else "write it in quotes if it is meant as text")
        if re.search(pattern, value) is None or value != value.strip():
            raise ValueError
        return value

    return scalar(accepts, {"type": "string", "pattern": pattern}, parse)


def switch() -> Scalar[bool]:
    """`true` or `false`."""

    def parse(value: Data) -> bool:
        if not isinstance(value, bool):
            raise ValueError("YAML 1.2 reads yes, no, on and off as text")
        return value

    return scalar("true or false", {"type": "boolean"}, parse)


def choice(names: Sequence[str]) -> Scalar[str]:
    """One of a few names."""

    def parse(value: Data) -> str:
        if value not in names or not isinstance(value, str):
            raise ValueError(nearest(value, names))
        return value

    return scalar(f"one of {', '.join(names)}", {"enum": list(names)}, parse)


def or_none(kind: Scalar[T]) -> Scalar[T | None]:
    """A plain value, or the word `none`."""

    def parse(value: Data) -> T | None:
        return None if value == NONE else kind.parse(value)

    schema = {"anyOf": [{"const": NONE}, kind.schema]}
    return scalar(f"{kind.accepts}, or {NONE}", schema, parse)


def listing(kind: Kind[T], minimum: int = 1, distinct: bool = True) -> Kind[tuple[T, ...]]:
    """A list of one kind of item."""
    accepts = f"a list, each item {kind.accepts}"

    def read(cursor: Cursor) -> tuple[T, ...]:
        if not isinstance(cursor.value, list) or len(cursor.value) < minimum:
            raise cursor.expected(accepts)
        return items(cursor, kind.read, distinct)

    schema = {"type": "array", "items": kind.schema, "minItems": minimum}
    return Kind(accepts, schema | ({"uniqueItems": True} if distinct else {}), read)


def items(cursor: Cursor, read: Callable[[Cursor], T], distinct: bool) -> tuple[T, ...]:
    """Read every item of a list, noting all problems. Raises Rejected if there was any."""
    assert isinstance(cursor.value, list)
    found: list[T] = []
    complete = True
    for index in range(len(cursor.value)):
        item = cursor.at(index)
        try:
            value = read(item)
            if distinct and value in found:
                raise item.refuse(f"{describe(item.value)} is given twice in this list")
            found.append(value)
        except Rejected:
            complete = False
    if not complete:
        raise Rejected
    return tuple(found)


def one_or_list(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """One value, or a list of distinct ones; a list is sorted, so that its order means nothing."""
    many = listing(kind)

    def read(cursor: Cursor) -> tuple[T, ...]:
        if isinstance(cursor.value, list):
            found: Any = many.read(cursor)
            return tuple(sorted(found))
        return (kind.read(cursor),)

    accepts = f"{kind.accepts}, or a list of these"
    return Kind(accepts, {"anyOf": [kind.schema, many.schema]}, read)


@dataclass(frozen=True)
class Key:
    """One key of a section. `field` is its name in the spec, where that is another."""

    name: str
    kind: Kind[Any]
    doc: str
    field: str = ""
    required: bool = False


def section(keys: Sequence[Key]) -> Kind[dict[str, Any]]:
    """A mapping with known keys; reads to a dict by field. Nothing at all stands for no keys."""
    accepts = f"a mapping with keys {', '.join(key.name for key in keys)}"
    properties = {key.name: {"description": key.doc, **key.kind.schema} for key in keys}
    required = [key.name for key in keys if key.required]
    schema = {
        "type": "object" if required else ["object", "null"],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Kind(accepts, schema, lambda cursor: _read_section(cursor, keys, accepts))


def _read_section(cursor: Cursor, keys: Sequence[Key], accepts: str) -> dict[str, Any]:
    given = {} if cursor.value is None else cursor.value
    if not isinstance(given, dict):
        raise cursor.expected(accepts)
    names = [key.name for key in keys]
    unknown = [name for name in given if name not in names]
    complete = check_keys(cursor, given, names)
    found: dict[str, Any] = {}
    for key in keys:
        if key.name in given:
            try:
                found[key.field or key.name] = key.kind.read(cursor.at(key.name))
            except Rejected:
                complete = False
        elif key.required:
            complete = False
            if not any(nearest(name, names) == nearest(key.name, names) for name in unknown):
                cursor.refuse(f"missing key '{key.name}'; expected {key.kind.accepts}", key.name)
    if not complete:
        raise Rejected
    return found


def check_keys(cursor: Cursor, given: Iterable[str], accepted: Sequence[str]) -> bool:
    """Note every unknown key; True if there is none."""
    unknown = [name for name in given if name not in accepted]
    names = ", ".join(accepted) or NONE
    for name in unknown:
        said = f"unknown key '{name}'; accepted: {names}{nearest(name, accepted)}"
        cursor.refuse(said, name, at_key=True)
    return not unknown
