"""YAML 1.2 in, plain data and positions out; whatever is wrong has a line."""

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archsearch.errors import SpecError
from archsearch.yaml_file import MAX_BYTES, Document, Position, dotted, read_yaml


def read(folder: Path, text: str | bytes) -> Document:
    path = folder / "file.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("3.2e-3", 3.2e-3),
        (".5", 0.5),
        ("-12", -12),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("none", "none"),
        ('"1e-3"', "1e-3"),
        ("'true'", "true"),
        ("|-\n  1", "1"),
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    data = read(tmp_path, f"%YAML 1.1\n---\nkey: {text}\n").data
    assert isinstance(data, dict)
    assert data["key"] == value
    assert type(data["key"]) is type(value)


def test_keys_stay_text(tmp_path: Path) -> None:
    assert read(tmp_path, "on: 1\n2: 3\nnull: 4\n").data == {"on": 1, "2": 3, "null": 4}


def test_every_key_and_value_has_its_line_and_column(tmp_path: Path) -> None:
    document = read(tmp_path, "# about\na:\n  b: [1, {c: 2}]\n  'd':\n    - x\n")
    assert document.data == {"a": {"b": [1, {"c": 2}], "d": ["x"]}}
    assert document.keys[("a", "b")] == Position(3, 3)
    assert document.values[("a", "b", 1, "c")] == Position(3, 14)
    assert document.keys[("a", "d")] == Position(4, 3)
    assert document.values[("a", "d", 0)] == Position(5, 7)
    assert dotted(("a", "b", 1, "c")) == "a.b[1].c"


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    document = read(tmp_path, b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert document.data == {"a": 1, "b": 2}
    assert document.keys[("b",)] == Position(2, 1)


def test_an_alias_repeats_its_anchor(tmp_path: Path) -> None:
    document = read(tmp_path, "a: &x {b: 1}\nc: [*x, *x]\n")
    assert document.data == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}
    assert document.values[("c", 1, "b")] == Position(1, 11)


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)

REFUSED = [
    # name, text, line, column, what is said
    ("empty", "", 1, 1, "the file is empty"),
    ("comment", "# nothing\n", 1, 1, "the file is empty"),
    ("marker", "---\n", 1, 1, "the file is empty"),
    ("tab", "a:\n\tb: 1\n", 2, 1, "indent with spaces"),
    ("colon", "a: b: c\n", 1, 5, "mapping values are not allowed here"),
    ("bracket", "a: 1\nb: [1,\n  2\nc: 3\n", 4, 2, "the '[' of line 2, column 4 is still open"),
    ("quote", "a: 'x\n", 2, 1, "found unexpected end of stream"),
    ("twice", "a: 1\nb:\n  c: 1\n  c: 2\n", 4, 3, "'c' is given twice, on line 3 and on line 4"),
    ("second document", "a: 1\n---\nb: 2\n", 2, 1, "a second document starts here"),
    ("no anchor", "a: *x\n", 1, 4, "alias '*x' has no finished anchor '&x'"),
    ("own anchor", "a: &x [*x]\n", 1, 8, "alias '*x' has no finished anchor '&x'"),
    ("tag", "a: !!int 3\n", 1, 4, "found the tag 'tag:yaml.org,2002:int'"),
    ("python", "a: !!python/object:os.system {}\n", 1, 4, "found the tag"),
    ("list as key", "a: 1\n? [b]\n: 2\n", 2, 3, "a key is plain text"),
    ("nul", "a: 1\nb: \x00\n", 2, 4, "the character U+0000"),
    ("version", "%YAML 3.0\n---\na: 1\n", 1, 1, "incompatible YAML"),
    ("deep", "a: " + "[" * 5000, 1, 35, "nested more than 32 deep"),
    ("deep by indent", "".join(" " * i + "- \n" for i in range(60)), 33, 33, "nested more than"),
    ("bomb", BOMB, 1, 34, "once aliases are followed"),
    ("long number", "a: 1\nb: " + "9" * 9999, 2, 4, "a number of 9999 characters"),
]


@pytest.mark.parametrize(("text", "line", "column", "said"), [r[1:] for r in REFUSED])
def test_what_is_refused_is_located(
    tmp_path: Path, text: str, line: int, column: int, said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    problem = caught.value.problems[0]
    assert said in problem.message
    assert (problem.line, problem.column) == (line, column)
    assert str(caught.value).startswith(f"{tmp_path / 'file.yaml'}:{line}:{column}: ")


def test_every_repeated_key_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, "a: 1\na: 2\nb: {c: 1, c: 2, c: 3}\n")
    assert [(p.line, p.path) for p in caught.value.problems] == [(2, "a"), (3, "b.c"), (3, "b.c")]


def test_bytes_that_are_no_utf8_are_located(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="0xe9 is not UTF-8") as caught:
        read(tmp_path, b"a: 1\nb: caf\xe9\n")
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 7)


def test_a_path_that_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "absent.yaml", "no such file"), (tmp_path, "this is a folder")):
        with pytest.raises(SpecError, match=said) as caught:
            read_yaml(path)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(SpecError, match="has 1048577 bytes"):
        read(tmp_path, " " * (MAX_BYTES + 1))
    with pytest.raises(SpecError, match="cannot be read"):
        read_yaml(Path("nul\0.yaml"))


PIECES = "a|1|: |\n|  |- |[|]|{|}|,|&x |*x|!t |'|\"|>|#|?|%|---\n|...\n|\t|<<|\r|é|\x85|\u2028"
FRAGMENTS = st.sampled_from([*PIECES.split("|"), "|"])


@settings(deadline=None)
@given(st.lists(FRAGMENTS, max_size=30).map("".join) | st.text(max_size=30))
def test_no_text_raises_anything_but_a_spec_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(SpecError):
        assert () in read_yaml(path).values
