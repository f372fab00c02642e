"""A YAML 1.2 file as plain data, plus the line and column of every key and value.

Scalars follow the YAML 1.2 core schema: `1e-3` is a number, `no`, `on` and `yes` are text, only
`true` and `false` are booleans. A key given twice, a tag, a second document or an anchor that does
not exist is an error; an alias repeats what its anchor marks. Knows nothing of studies.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from archsearch.errors import Problem, SpecError

Data = bool | int | float | str | None | list["Data"] | dict[str, "Data"]

Route = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""Bounds of a file; a study is a page or two, so whatever exceeds them is a mistake."""

_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_DIGITS = 30
"""Longest number that is read; longer ones are refused as a whole, before any arithmetic."""


@dataclass(frozen=True)
class Position:
    """1-based line and column."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """One file. `keys` and `values` say where each key and each value starts.

    A value that came through an alias has the position of what it repeats.
    """

    source: str
    data: Data
    keys: Mapping[Route, Position]
    values: Mapping[Route, Position]


def dotted(route: Route) -> str:
    """Write a route for people: `model.layers[1].one_of[0]`."""
    text = ""
    for step in route:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def read_yaml(path: Path) -> Document:
    """Read a file.

    Raises:
        SpecError: the file cannot be read, is no YAML, is empty, or breaks one of the rules above.
    """
    source = str(path)
    text = _read_text(path, source)
    reader = _Reader(source)
    try:
        root = reader.read(YAML(typ="safe", pure=True).parse(text))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        said = f"the character U+{ord(text[error.position]):04X} may not stand in a YAML file"
        raise _refusal(source, Position(line, column), said) from error
    except MarkedYAMLError as error:
        raise reader.explain(error) from error
    except YAMLError as error:
        raise _refusal(source, Position(1, 1), str(error)) from error
    unfolded = _Unfolded(source)
    data = unfolded.unfold(root, ())
    if unfolded.problems:
        raise SpecError(source, unfolded.problems)
    return Document(source, data, unfolded.keys, unfolded.values)


def _read_text(path: Path, source: str) -> str:
    whole = Position(0, 0)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise _refusal(source, whole, "no such file") from error
    except IsADirectoryError as error:
        raise _refusal(source, whole, "this is a folder; a study is one YAML file") from error
    except (OSError, ValueError) as error:
        raise _refusal(source, whole, f"cannot be read: {error}") from error
    if len(raw) > MAX_BYTES:
        said = f"the file has {len(raw)} bytes; a study has at most {MAX_BYTES}"
        raise _refusal(source, whole, said)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = len(before) - (before.rfind(b"\n") + 1) + 1
        said = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise _refusal(source, Position(line, column), said) from error


def _refusal(source: str, at: Position, message: str) -> SpecError:
    return SpecError(source, (Problem(at.line, at.column, "YAML", message),))


@dataclass(frozen=True)
class _Scalar:
    at: Position
    value: bool | int | float | str | None


@dataclass(frozen=True)
class _List:
    at: Position
    items: "tuple[_Node, ...]"


@dataclass(frozen=True)
class _Entry:
    key: str
    at: Position
    value: "_Node"


@dataclass(frozen=True)
class _Mapping:
    at: Position
    entries: tuple[_Entry, ...]


_Node = _Scalar | _List | _Mapping


@dataclass
class _Reader:
    """Builds the tree from parser events: one document, aliases share the node they name."""

    source: str
    anchors: dict[str, _Node] = field(default_factory=dict)
    open_brackets: list[tuple[str, Position]] = field(default_factory=list)
    depth: int = 0

    def read(self, events: Iterator[Any]) -> _Node:
        root: _Node | None = None
        for event in events:
            if isinstance(event, DocumentStartEvent):
                if root is not None:
                    said = "a second document starts here; a study is one document"
                    raise _refusal(self.source, _start(event), said)
                root = self.node(next(events), events)
        if root is None or (isinstance(root, _Scalar) and root.value is None):
            raise _refusal(self.source, Position(1, 1), "the file is empty")
        return root

    def node(self, event: Any, events: Iterator[Any]) -> _Node:
        at = _start(event)
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                said = f"alias '*{event.anchor}' has no finished anchor '&{event.anchor}' before it"
                raise _refusal(self.source, at, said)
            return self.anchors[event.anchor]
        if event.tag is not None:
            said = f"found the tag '{event.tag}'; tags are not used here, write the plain value"
            raise _refusal(self.source, at, said)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(self.source, at, f"nested more than {MAX_DEPTH} deep")
        node = self.content(event, events)
        self.depth -= 1
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def content(self, event: Any, events: Iterator[Any]) -> _Node:
        at = _start(event)
        if isinstance(event, ScalarEvent):
            is_plain = event.style is None
            return _Scalar(at, self.scalar(event.value, at) if is_plain else event.value)
        is_list = isinstance(event, SequenceStartEvent)
        if event.flow_style:
            self.open_brackets.append(("[" if is_list else "{", at))
        node = _List(at, self.items(events)) if is_list else _Mapping(at, self.entries(events))
        if event.flow_style:
            self.open_brackets.pop()
        return node

    def items(self, events: Iterator[Any]) -> tuple[_Node, ...]:
        found = []
        while not isinstance(event := next(events), SequenceEndEvent):
            found.append(self.node(event, events))
        return tuple(found)

    def entries(self, events: Iterator[Any]) -> tuple[_Entry, ...]:
        found = []
        while not isinstance(event := next(events), MappingEndEvent):
            at = _start(event)
            if not isinstance(event, ScalarEvent) or event.tag is not None:
                said = "a key is plain text, not a list, a mapping, an alias or a tag"
                raise _refusal(self.source, at, said)
            found.append(_Entry(event.value, at, self.node(next(events), events)))
        return tuple(found)

    def scalar(self, text: str, at: Position) -> bool | int | float | str | None:
        """Resolve a plain scalar by the core schema."""
        if text in _WORDS:
            return _WORDS[text]
        if _SPECIAL.fullmatch(text):
            return float(text.replace(".", ""))
        is_integer, is_based = _INTEGER.fullmatch(text), _BASED.fullmatch(text)
        if not (is_integer or is_based or _FLOAT.fullmatch(text)):
            return text
        if len(text) > _MAX_DIGITS:
            said = f"a number of {len(text)} characters; at most {_MAX_DIGITS} are read"
            raise _refusal(self.source, at, said)
        return int(text) if is_integer else int(text, 0) if is_based else float(text)

    def explain(self, error: MarkedYAMLError) -> SpecError:
        """Say what the parser tripped over, and name a bracket that was never closed."""
        mark = error.problem_mark or error.context_mark
        at = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
        said = error.problem or error.context or "this is not YAML"
        if "'\\t'" in said:
            said = "found a tab; indent with spaces"
        elif self.open_brackets:
            bracket, opened = self.open_brackets[-1]
            said += f"; the '{bracket}' of line {opened.line}, column {opened.column} is still open"
        return _refusal(self.source, at, said)


def _start(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


@dataclass
class _Unfolded:
    """Turns the tree into plain data; aliases become copies, so their number is bounded."""

    source: str
    keys: dict[Route, Position] = field(default_factory=dict)
    values: dict[Route, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def unfold(self, node: _Node, route: Route) -> Data:
        self.values[route] = node.at
        if len(route) > MAX_DEPTH or len(self.values) > MAX_VALUES:
            said = f"more than {MAX_VALUES} values or {MAX_DEPTH} levels once aliases are followed"
            raise _refusal(self.source, node.at, said)
        match node:
            case _Scalar():
                return node.value
            case _List():
                return [self.unfold(item, (*route, i)) for i, item in enumerate(node.items)]
        return self.mapping(node, route)

    def mapping(self, node: _Mapping, route: Route) -> Data:
        data: dict[str, Data] = {}
        for entry in node.entries:
            inner, at = (*route, entry.key), entry.at
            if entry.key in data:
                first = self.keys[inner].line
                said = f"key '{entry.key}' is given twice, on line {first} and on line {at.line}"
                self.problems.append(Problem(at.line, at.column, dotted(inner), said))
                continue
            self.keys[inner] = at
            data[entry.key] = self.unfold(entry.value, inner)
        return data
