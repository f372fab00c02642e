"""docs/studies.md: every example is read, every key is explained, every default holds."""

import re
from pathlib import Path

import pytest

from archsearch.recipes import RECIPES
from archsearch.spec import StudySpec, TrainSpec
from archsearch.study_file import load_study, study_schema

PAGE = (Path(__file__).parent.parent / "docs" / "studies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
BASE = {
    "study": "study: page",
    "model": "model: {layers: [base_conv, attention]}",
    "task": "task: {mqar: tiny}",
}


def load(folder: Path, block: str) -> StudySpec:
    """Read a block as a study; what it leaves out at the top is filled in."""
    given = set(re.findall(r"^(\w+):", block, flags=re.MULTILINE))
    missing = "".join(f"{line}\n" for key, line in BASE.items() if key not in given)
    path = folder / "study.yaml"
    path.write_text(missing + block, encoding="utf-8")
    return load_study(path)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_is_a_study(tmp_path: Path, block: str) -> None:
    load(tmp_path, block)


def rows(heading: str) -> set[str]:
    """Keys in the tables below a heading."""
    _, _, after = PAGE.partition(f"\n## {heading}\n")
    assert after, heading
    return set(re.findall(r"^\| `([\w-]+)` \|", after.split("\n## ")[0], flags=re.MULTILINE))


def test_every_key_is_in_the_table_of_its_section() -> None:
    schema = study_schema()
    top = schema["properties"]
    assert rows("The top of the file") == {*top}
    model = schema["else"]["properties"]["model"]["properties"]
    assert {*model} <= rows("`model`")
    for name in ("train", "objectives", "search", "resources", "tracking"):
        assert rows(f"`{name}`") == {*top[name]["properties"]}, name
    assert {*top["limits"]["properties"]} == rows("`objectives`") - {"recall"}
    mqar = top["task"]["properties"]["mqar"]["anyOf"][1]["properties"]
    assert rows("`task`") == {*mqar, *RECIPES}
    for field in ("schedule", "precision"):
        (row,) = re.findall(rf"^\| `{field}` \|(.*)\|$", PAGE, flags=re.MULTILINE)
        named = re.findall(r"`(\w+)`", row)
        assert named == list(TrainSpec.model_fields[field].annotation.__args__)  # type: ignore[union-attr]


def test_the_defaults_are_the_defaults(tmp_path: Path) -> None:
    spelled, smallest = load(tmp_path, BLOCKS[-1]), load(tmp_path, "")
    assert spelled.study == "defaults"
    assert spelled.model_copy(update={"study": smallest.study}) == smallest
    assert spelled.identity == smallest.identity
