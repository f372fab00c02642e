"""A study's YAML: what is accepted, what it means, and what is said about mistakes."""

import contextlib
import json
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from archsearch.errors import SpecError
from archsearch.model_spec import ChannelOption
from archsearch.recipes import RECIPES
from archsearch.registry import default_parts, mixer_fields, mixer_names
from archsearch.spec import JustReadTwice, Limit, Metric, Objective, StudySpec, StudyStart
from archsearch.study_file import load_study, study_schema
from archsearch.yaml_file import read_yaml

GOOD = """\
study: good
seed: 1
model:
  width: 32
  layers:
    - base_conv
    - one_of:
        - attention
        - sliding_window: {window: [16, 8], heads: 1}
        - linear_attention: {feature_dim: {from: 8, to: 24, step: 8}, heads: 1}
        - none
  channel_mixer: none
task:
  mqar: tiny
train:
  learning_rates: [1e-3, 1e-2]
  seeds: 2
  precision: bf16
objectives:
  recall: maximize
  state_bytes: {minimize: {context: 64}}
limits: {parameters: 2M, state_bytes: 512KiB}
search: {sampler: random, trials: 8, time: 30m, warm_start: [smallest, {study: old}]}
resources: {gpus: 1/2, cpus: 1, device: H200}
tracking: {mlflow: none}
"""


def load(folder: Path, text: str) -> StudySpec:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return load_study(path)


def change(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_a_study_is_read_as_written(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    assert (spec.study, spec.seed, spec.model.width) == ("good", 1, (32,))
    fixed, searched = spec.model.layers
    assert [(option.mixer, option.fields) for option in fixed.options] == [("base_conv", {})]
    options = {option.mixer: option.fields for option in searched.options}
    assert [*options] == ["attention", "sliding_window", "linear_attention", "none"]
    assert options["sliding_window"] == {"window": (8, 16), "heads": (1,)}
    assert options["linear_attention"]["feature_dim"] == (8, 16, 24)
    assert spec.train.learning_rates == (1e-3, 1e-2)
    assert (spec.train.seeds, spec.train.precision) == (2, "bf16")
    assert spec.limits == (
        Limit(metric="state_bytes", maximum=524_288, context=64),
        Limit(metric="parameters", maximum=2_000_000),
    )
    assert (spec.search.time_s, spec.search.warm_start) == (
        1800.0,
        ("smallest", StudyStart(study="old")),
    )
    assert (spec.resources.gpus, spec.resources.device) == (0.5, "H200")
    assert spec.tracking.mlflow is None


def test_a_bare_alternative_keeps_its_declared_ranges_and_a_bare_layer_its_defaults(
    tmp_path: Path,
) -> None:
    spec = load(tmp_path, change("    - base_conv\n", "    - linear_attention\n"))
    bare, searched = spec.model.layers
    assert bare.options[0].fields == {}
    assert searched.options[0].fields["heads"] == (1, 2, 4, 8, 16)
    spec = load(tmp_path, change("    - base_conv\n", "    - linear_attention: {heads: 2}\n"))
    assert spec.model.layers[0].options[0].fields == {"heads": (2,)}


MINIMAL = "study: s\nmodel: {layers: [base_conv, attention]}\ntask: {mqar: tiny}\n"


def test_what_is_left_out_gets_its_default(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL + "train:\nlimits:\nsearch:\n")
    assert spec.model.width == (64,)
    assert spec.model.channel_mixer == (ChannelOption(kind="none"),)
    assert spec.objectives == (
        Objective(metric="recall", direction="maximize"),
        Objective(metric="state_bytes", direction="minimize", context=spec.task.longest),
    )
    assert spec.limits == ()
    assert (spec.search.trials, spec.resources.gpus) == (32, 0.0)


def test_the_spec_survives_json(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    again = StudySpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.identity == spec.identity


def test_the_order_of_lists_of_numbers_is_no_part_of_the_study(tmp_path: Path) -> None:
    one = load(tmp_path, change("[16, 8]", "[8, 16]"))
    other = load(tmp_path, change("[1e-3, 1e-2]", "[0.01, 0.001]"))
    assert one.identity == other.identity == load(tmp_path, GOOD).identity


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("swiglu", (4.0,)),
        ("{swiglu: {ratio: 2}}", (2.0,)),
        ("{swiglu: {ratio: [4, 2]}}", (2.0, 4.0)),
    ],
)
def test_channel_mixers(tmp_path: Path, text: str, ratio: tuple[float, ...]) -> None:
    gated = ChannelOption(kind="swiglu", ratio=ratio)
    spec = load(tmp_path, change("channel_mixer: none", f"channel_mixer: {text}"))
    assert spec.model.channel_mixer == (gated,)
    both = f"channel_mixer: {{one_of: [none, {text}]}}"
    spec = load(tmp_path, change("channel_mixer: none", both))
    assert spec.model.channel_mixer == (ChannelOption(kind="none"), gated)


def test_a_field_may_be_narrowed_to_a_log_range(tmp_path: Path) -> None:
    spec = load(tmp_path, change("[16, 8]", "{from: 8, to: 100, scale: log2}"))
    assert spec.model.layers[1].options[1].fields["window"] == (8, 16, 32, 64)


def test_a_field_without_a_declared_range_may_be_given_a_list(tmp_path: Path) -> None:
    spec = load(tmp_path, change("[16, 8]", "8, rope: [true, false]"))
    assert spec.model.layers[1].options[1].fields["rope"] == (False, True)


def test_another_name_of_a_value_is_the_value(tmp_path: Path) -> None:
    """It is the same architecture, and is not searched beside it."""
    old, name = (
        "- linear_attention: {feature_dim: {from: 8, to: 24, step: 8}",
        "feature_map: pos_elu",
    )
    text = change(old, f"- linear_attention: {{{name}, feature_dim: 8")
    spec = load(tmp_path, text)
    assert spec.model.layers[1].options[2].fields["feature_map"] == ("elu",)
    assert spec.identity == load(tmp_path, text.replace("pos_elu", "elu")).identity
    assert VALIDATOR().is_valid(read_yaml(tmp_path / "study.yaml").data)
    assert "pos_elu" not in mixer_fields("linear_attention")["feature_map"].candidates
    with pytest.raises(SpecError, match="'pos_elu' is given twice"):
        load(tmp_path, text.replace("pos_elu", "[elu, pos_elu]"))


SPELLED = """
  mqar:
    vocab_size: 128
    train: [{length: 32, pairs: 4, examples: 1k}]
    test: [{length: 32, pairs: 4, examples: 100}, {length: 64, pairs: 8, examples: 100}]
"""


def test_a_task_may_be_spelled_out_and_a_recipe_overridden(tmp_path: Path) -> None:
    spec = load(tmp_path, change(" tiny\n", "tiny\n").replace("\n  mqar:tiny\n", SPELLED))
    assert (spec.task.recipe, spec.task.longest) == ("custom", 64)
    assert spec.task.train[0].examples == 1000
    assert spec.objectives[1].context == 64
    assert spec.train.epochs == 32, "a task without a recipe trains as the published one"
    over = load(tmp_path, change("mqar: tiny", "mqar: {recipe: tiny, vocab_size: 128}"))
    plain = load(tmp_path, GOOD)
    assert (over.task.recipe, over.task.vocab_size) == ("custom", 128)
    assert over.train == plain.train
    size = plain.task.vocab_size
    same = load(tmp_path, change("mqar: tiny", f"mqar: {{recipe: tiny, vocab_size: {size}}}"))
    assert same.task == plain.task


def test_a_prompt_lengthens_what_is_read_and_keeps_the_recipe_s_training(tmp_path: Path) -> None:
    plain = load(tmp_path, MINIMAL)
    twice = load(tmp_path, MINIMAL.replace("tiny", "{recipe: tiny, prompt: twice}"))
    assert (plain.task.longest, twice.task.longest) == (64, 64 + 2 * 16)
    assert [plain.objectives[1].context, twice.objectives[1].context] == [64, 96]
    assert (twice.task.recipe, twice.train) == ("custom", plain.train)
    assert twice.task.test == plain.task.test
    same = load(tmp_path, MINIMAL.replace("tiny", "{recipe: tiny, prompt: plain}"))
    assert same == plain and same.identity == plain.identity != twice.identity


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("next_token", None),
        ("just_read_twice", JustReadTwice(mask_share=0.15, mask_weight=0.25, prefix=None)),
        ("{just_read_twice: }", JustReadTwice()),
        (
            "{just_read_twice: {mask_share: 0.5, prefix: 8}}",
            JustReadTwice(mask_share=0.5, prefix=8),
        ),
    ],
)
def test_a_training_objective(tmp_path: Path, text: str, wanted: JustReadTwice | None) -> None:
    plain = load(tmp_path, MINIMAL)
    text = f"{MINIMAL}train: {{objective: {text}}}\n"
    found = load(tmp_path, text)
    assert found.train == plain.train.model_copy(update={"objective": wanted})
    assert (found.identity == plain.identity) == (wanted is None)
    Draft202012Validator(study_schema()).validate(read_yaml(tmp_path / "study.yaml").data)


def test_axes_are_measured_at_the_longest_test_sequence_unless_said(tmp_path: Path) -> None:
    text = change("  state_bytes: {minimize: {context: 64}}\n", "  decode_ms: minimize\n")
    text = text.replace("1/2", "1")
    spec = load(tmp_path, text.replace("512KiB}", "512KiB, decode_ms: {maximum: 5, batch: 8}}"))
    longest = spec.task.longest
    decode = spec.objectives[1]
    assert (decode.context, decode.batch) == (longest, 1)
    limits = {limit.metric: limit for limit in spec.limits}
    assert limits["state_bytes"].context == longest
    assert (limits["decode_ms"].context, limits["decode_ms"].batch) == (longest, 8)
    text = change("{minimize: {context: 64}}", "{minimize: {context: 512, reference: 1MiB}}")
    spec = load(tmp_path, text)
    assert spec.objectives[1].reference == 2**20
    assert spec.limits[0].context == 512, "a limit is measured where its objective is"


@pytest.mark.parametrize(
    ("text", "gpus"), [("0", 0.0), ("2", 2.0), ("0.25", 0.25), ("1/3", 1 / 3), ("1 / 8", 0.125)]
)
def test_gpus_are_whole_or_one_of_k(tmp_path: Path, text: str, gpus: float) -> None:
    assert load(tmp_path, change("1/2", text)).resources.gpus == gpus


def test_an_alias_repeats_a_layer(tmp_path: Path) -> None:
    layers = "layers: [&mix {one_of: [attention, base_conv]}, *mix]"
    spec = load(tmp_path, MINIMAL.replace("layers: [base_conv, attention]", layers))
    assert spec.model.layers[0] == spec.model.layers[1]


def test_every_problem_is_reported_in_the_order_of_lines(tmp_path: Path) -> None:
    text = GOOD.replace("seed: 1", "sead: 1").replace("attention\n", "atention\n", 1)
    text = text.replace("bf16", "bf17").replace("trials: 8", "trials: 0")
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    assert [problem.line for problem in caught.value.problems] == [2, 8, 18, 23]
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{tmp_path / 'study.yaml'}:2:1: sead: unknown key 'sead'; accepted: ")


PIECES = ["", "-1", "0", "1e9", "none", "null", "[]", "{}", ": ", ",", "\n", "true", ".inf"]
PIECES += ["'", "9999999999", "one_of", "2GiB", "- ", "é", "1/2", "x", "[1]", "&a ", "*a"]


VALIDATOR = cache(lambda: Draft202012Validator(study_schema()))


def assert_read_or_refused(folder: Path, text: str) -> None:
    with contextlib.suppress(SpecError):
        load(folder, text)
        # The schema may miss a mistake, but never marks what the reader accepts.
        VALIDATOR().validate(read_yaml(folder / "study.yaml").data)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(PIECES)),
        min_size=1,
        max_size=3,
    )
)
def test_no_mutation_raises_anything_but_a_spec_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, str]]
) -> None:
    text = GOOD
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    assert_read_or_refused(tmp_path_factory.getbasetemp(), text)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(GOOD.splitlines()) - 1), st.sampled_from(PIECES))
def test_no_value_in_place_of_another_raises_anything_but_a_spec_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, piece: str
) -> None:
    lines = GOOD.splitlines()
    key, colon, _ = lines[at].partition(": ")
    lines[at] = f"{key}{colon or ' '}{piece}"
    assert_read_or_refused(tmp_path_factory.getbasetemp(), "\n".join(lines))


def test_the_schema_is_a_schema_and_names_what_is_installed() -> None:
    schema = study_schema()
    Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    mixers = schema["$defs"]["mixer"]["properties"]
    assert [*mixers] == list(mixer_names())
    for name, described in mixers.items():
        parts = ["parts"] if default_parts(name) else []
        assert [*described["properties"]] == [*parts, *mixer_fields(name)]
    assert "tokens a token sees" in mixers["sliding_window"]["properties"]["window"]["description"]
    text = json.dumps(schema)
    assert all(f'"{name}"' in text for name in (*RECIPES, *get_args(Metric)))


def test_the_schema_leaves_room_for_the_mixers_of_plugin_files() -> None:
    own = {
        "study": "s",
        "model": {"layers": ["own", {"own": {"size": 1}}]},
        "task": {"mqar": "tiny"},
    }
    assert not VALIDATOR().is_valid(own)
    assert VALIDATOR().is_valid({**own, "plugins": ["./own.py"]})
    misspelt = {**own, "plugins": ["./own.py"], "model": {"layrs": ["own"]}}
    assert not VALIDATOR().is_valid(misspelt)
