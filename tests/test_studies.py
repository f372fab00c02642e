"""The studies that ship: each is read, agrees with the schema, and keeps what its comment says."""

from collections import Counter
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from archsearch.compose import count, walk
from archsearch.recipes import RECIPES
from archsearch.spec import StudySpec
from archsearch.study_file import load_study, study_schema
from archsearch.yaml_file import read_yaml

FOLDER = Path(__file__).parent.parent / "studies"
PATHS = sorted(FOLDER.glob("*.yaml"))


def study(name: str) -> StudySpec:
    return load_study(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_study_is_read_and_agrees_with_the_schema(path: Path) -> None:
    spec = load_study(path)
    assert spec.study == path.stem.replace("_", "-")
    Draft202012Validator(study_schema()).validate(read_yaml(path).data)


def test_the_minimal_study_is_five_lines() -> None:
    lines = (FOLDER / "minimal.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 5


def test_the_quickstart_shows_enough_in_two_minutes() -> None:
    spec = study("quickstart")
    searched = {option.mixer for slot in spec.model.layers for option in slot.options}
    assert len(searched) >= 4
    assert 16 <= spec.search.trials <= count(spec.model)
    assert (len(spec.train.learning_rates), spec.train.seeds) == (2, 2)
    assert [objective.metric for objective in spec.objectives] == ["recall", "state_bytes"]
    assert spec.search.warm_start == ("smallest", "largest")
    assert (spec.resources.gpus, spec.resources.parallel) == (0.0, 2)


def test_the_ratio_study_tries_every_share_in_every_place() -> None:
    spec = study("hybrid_ratio")
    orders = {tuple(layer.mixer for layer in one.arch.layers) for one in walk(spec.model)}
    assert {len(order) for order in orders} == {5}
    shares = Counter(order.count("attention") for order in orders)
    assert shares == {0: 1, 1: 3, 2: 3}
    assert spec.search.trials <= count(spec.model) == 2 * sum(shares.values())


def test_the_published_sweep_is_covered() -> None:
    spec = study("based_figure2")
    assert spec.task == RECIPES["zoology-figure2"].task
    assert spec.train == RECIPES["zoology-figure2"].train
    have = {
        (arch.width, arch.layers[1].mixer, size)
        for arch in (one.arch for one in walk(spec.model))
        for size in [arch.layers[1].fields.get("window", arch.layers[1].fields.get("feature_dim"))]
    }
    attention = {(width, "attention", None) for width in (64, 128)}
    linear = {(width, "linear_attention", f) for width in (48, 64, 128) for f in (8, 16, 24)}
    windows = {(128, "sliding_window", 2**i) for i in range(3, 11)}
    assert attention | linear | windows <= have
    assert spec.search.trials == count(spec.model)
