"""Mixers that a study brings along in files of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from archsearch.errors import SpecError
from archsearch.registry import forget_plugin_file, mixer_names
from archsearch.study_file import load_study, plugin_files

PLUGIN = '''
from dataclasses import dataclass
from typing import Annotated
from archsearch.mixer import Mixer
from archsearch.space import Choice

class Plugin(Mixer):
    """A mixer for this test."""
    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        size: Annotated[int, Choice(1, 2, 4), "a size"] = 1
        slope: Annotated[float, Choice(0.5, 1.0)] = 1.0
        free: float = 0.0
        word: str = "a"
        def __post_init__(self):
            {rule}
        def state_spec(self, context_len, dtype):
            return ()
        def flops(self, context_len):
            return 1
'''
USES = "study: s\nplugins: [{path}]\nmodel: {{layers: [{layer}]}}\ntask: {{mqar: tiny}}\n"


@pytest.fixture(autouse=True)
def forget_plugins() -> Iterator[None]:
    before = mixer_names()
    yield
    for name in set(mixer_names()) - set(before):
        forget_plugin_file(name)


def with_plugin(folder: Path, name: str, rule: str, layer: str) -> Path:
    source = PLUGIN.replace("{rule}", rule)
    (folder / f"{name}.py").write_text(source, encoding="utf-8", errors="surrogateescape")
    path = folder / "study.yaml"
    path.write_text(USES.format(path=f"./{name}.py", layer=layer), encoding="utf-8")
    return path


def test_a_plugin_file_is_found_beside_the_study(tmp_path: Path) -> None:
    layer = "beside_study: {size: 3, slope: [1, 0.75], free: [7, 8.5], word: [b, c]}"
    spec = load_study(with_plugin(tmp_path, "beside_study", "pass", f"{{{layer}}}"))
    assert spec.plugins == (str(tmp_path / "beside_study.py"),)
    assert {path.name for path in tmp_path.iterdir()} == {"beside_study.py", "study.yaml"}
    (shipped,) = plugin_files(spec)
    assert shipped.name == "beside_study"
    assert shipped.source == (tmp_path / "beside_study.py").read_text()
    fields = spec.model.layers[0].options[0].fields
    assert fields == {"size": (3,), "slope": (0.75, 1.0), "free": (7.0, 8.5), "word": ("b", "c")}
    assert all(type(value) is float for value in fields["free"])


@pytest.mark.parametrize(
    ("name", "rule", "layer", "line", "said"),
    [
        (
            "rule_none",
            "raise ValueError('never')",
            "rule_none",
            3,
            "built: mixer 'rule_none'",
        ),
        ("rule_bug", "1 / 0", "rule_bug", 3, "mixer 'rule_bug' raised ZeroDivisionError"),
        ("wide", "pass", "{wide: {size: 5}}", 3, "found 5; expected an integer from 1 to 4"),
        ("words", "pass", "{words: {word: 3}}", 3, "found 3; expected text for 'word'"),
        ("syntax", "oops(", "syntax", 2, "mixer 'syntax' fails to import"),
        ("leaves", "import sys\n            sys.exit(0)", "leaves", 3, "raised SystemExit(0)"),
        ("accent", "pass  # \udce9", "accent", 2, "accent.py is not UTF-8 at byte"),
        ("attention", "pass", "attention", 2, "would be a second mixer called 'attention'"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said(
    tmp_path: Path, name: str, rule: str, layer: str, line: int, said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_study(with_plugin(tmp_path, f"{name}", rule, layer))
    assert caught.value.problems[0].line == line
    assert said in caught.value.problems[0].message


def test_a_plugin_that_does_not_work_is_not_kept(tmp_path: Path) -> None:
    path = with_plugin(tmp_path, "mended", "oops(", "mended")
    with pytest.raises(SpecError, match="fails to import"):
        load_study(path)
    assert "mended" not in mixer_names()
    load_study(with_plugin(tmp_path, "mended", "pass", "mended"))
    assert "mended" in mixer_names()


def test_a_plugin_that_ends_the_process_on_import_is_said(tmp_path: Path) -> None:
    path = with_plugin(tmp_path, "leaves_at_once", "pass", "leaves_at_once")
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"fails to import: SystemExit\(0\)"):
        load_study(path)


def test_a_plugin_that_does_not_exist_is_said_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(USES.format(path="./absent.py", layer="attention"), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_study(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (2, 11)
    assert "absent.py is not a Python file" in problem.message
