"""Blocks, ratios, ties and doubled sizes as a study writes them, and what is said of mistakes."""

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from archsearch.compose import count
from archsearch.errors import Problem, SpecError
from archsearch.model_spec import Block, ModelSpec, Ratio
from archsearch.study_file import load_study, study_schema
from archsearch.yaml_file import read_yaml

STACK = "study: bad\ntask: {mqar: tiny}\nmodel:\n  width: 32\n  layers:\n"
"""A study up to its layers, which begin on line 6."""

RATIO = "    - ratio: {of: 4, mix: [{layer: attention, share: %s}], rest: base_conv}\n"
OPEN = "{one_of: [attention, base_conv], tie: local}"

BAD_STACKS = [
    # the layers, the line, what the message holds, and whether a schema cannot say it
    ("    - repeat: 2\n", 6, "missing key 'layers'; expected a list of layers", False),
    ("    - {repeat: 0, layers: [attention]}\n", 6, "found 0; expected an integer from 1", False),
    ("    - {repeat: 2, layers: []}\n", 6, "found an empty list; expected a list of layers", False),
    ("    - {repeat: 2, layer: [attention]}\n", 6, "unknown key 'layer'; accepted: repeat", False),
    ("    - {repet: 2, layers: [attention]}\n", 6, "of repet, layers; expected a mixer's", False),
    ("    - {repet: 2, layers: [attention]}\n", 6, "did you mean 'repeat'?", False),
    (
        "    - repeat: 2\n      layers: [{one_of: [attention]}]\n      untied: [haeds]\n",
        8,
        "found 'haeds', which nothing in here searches; searched: heads, kv_heads; did you mean",
        True,
    ),
    ("    - {repeat: 2, layers: [attention], untied: [heads]}\n", 6, "searched: nothing", True),
    ("    - {repeat: 2, layers: [attention], untied: heads}\n", 6, "expected a list", False),
    (
        "    - {repeat: 1, layers: [{one_of: [attention]}], untied: [heads]}\n",
        6,
        "a block that stands once has no copies to untie",
        True,
    ),
    ("    - {repeat: 200, layers: [mamba, base_conv]}\n", 5, "400 layers; at most 256", True),
    (
        "    - repeat: 2\n      layers:\n        - one_of: [{repeat: 2, layers: [mamba]}]\n",
        8,
        "'repeat' is an item of `layers` alone; expected a mixer's name",
        False,
    ),
    ("    - {layers: [mamba]}\n", 6, "how often it comes; expected a mixer's name", False),
    ("    - {one_of: [{ratio: {of: 2}}]}\n", 6, "'ratio' is an item of `layers` alone", False),
    ("    - ratio\n", 6, "found 'ratio'; expected a mixer's name", False),
    ("    - ratio: 12\n", 6, "found 12; expected a mapping with keys of, mix, rest", False),
    ("    - ratio: {}\n      untied: [heads]\n", 6, "found untied beside 'ratio'", False),
    ("    - ratio: {of: 4, mix: [], rest: mamba}\n", 6, "found an empty list; expected", False),
    ("    - ratio: {of: 4, rest: base_conv}\n", 6, "missing key 'mix'", False),
    ("    - ratio: {of: 300, mix: [{layer: mamba, share: 1}], rest: mamba}\n", 6, "to 256", False),
    ("    - {one_of: [{one_of: [mamba]}]}\n", 6, "a one_of has no one_of in it; list all", False),
    (f"    - {'a' * 99}\n", 6, f"no mixer '{'a' * 57}...'; installed: attention", False),
    ('    - "mamba\\u202e"\n', 6, r"no mixer 'mamba\u202e'; installed: attention", False),
    (RATIO % "'\u0663/\u0664'", 6, "found '\u0663/\u0664'; expected a share", False),
    (RATIO % f"1/{10**60}", 6, "expected a share from 0 to 1, such as 1/8 or 0.25", False),
    (RATIO % "1.5", 6, "found 1.5; expected a share from 0 to 1", False),
    (RATIO % "1/0", 6, "found '1/0'; expected a share from 0 to 1, such as 1/8 or 0.25", False),
    (RATIO % "1:4", 6, "found '1:4'; expected a share from 0 to 1", False),
    (RATIO % "[1/4, 2]", 6, "found 2; expected a share from 0 to 1", False),
    (RATIO % "-0.5", 6, "found -0.5; expected a share", False),
    (RATIO % "[1/2, 0.5]", 6, "0.5 is given twice in this list", True),
    (RATIO % "[1/4, 0.26]", 6, "shares of 1/4 and of 13/50 are both 1 of 4 layers", True),
    (RATIO % "[0, 1/16]", 6, "a share of 1/16 is no layer of 4; expected 0 or at least", True),
    (RATIO % "1/4, place: middle", 6, "found 'middle'; expected one of early, late, spr", False),
    (RATIO % "1/4, place: [late, late]", 6, "'late' is given twice", False),
    (RATIO % "1/4, plase: late", 6, "unknown key 'plase'; accepted: layer, share, place", False),
    (
        "    - ratio:\n        of: 4\n        rest: gated_delta\n        mix:\n"
        "          - {layer: attention, share: 3/4}\n          - {layer: mamba, share: 1/2}\n",
        9,
        "the smallest shares are 5 of 4 layers; expected at most 4",
        True,
    ),
    (
        "    - ratio:\n        of: 4\n        rest: gated_delta\n        mix:\n"
        "          - {layer: attention, share: [1/4, 1]}\n"
        "          - {layer: mamba, share: 1/4}\n",
        10,
        "a share of 1 leaves too few of 4 layers for the other shares",
        True,
    ),
    (
        "    - ratio: {of: 4, mix: [{layer: mamba, share: 1}], rest: none}\n",
        6,
        "'none' cannot be in a ratio, which says how many layers there are",
        False,
    ),
    (
        "    - ratio:\n        of: 4\n        rest: mamba\n        mix:\n"
        "          - {layer: {one_of: [mamba, none]}, share: 1/4}\n",
        10,
        "'none' cannot be in a ratio",
        False,
    ),
    (
        "    - ratio: {of: 4, mix: [{layer: {attention: {heads: 3}}, share: 1}], rest: mamba}\n",
        6,
        "no choice of this layer can be built: mixer 'attention': heads is 3",
        True,
    ),
    (f"    - {OPEN}\n    - mamba\n", 6, "no other layer is tied as 'local'", True),
    (
        f"    - {OPEN}\n    - {OPEN}\n    - {{one_of: [attention], tie: locl}}\n",
        8,
        "no other layer is tied as 'locl'; did you mean 'local'?",
        True,
    ),
    (
        f"    - {OPEN}\n    - {{one_of: [attention], tie: local}}\n",
        7,
        "layers tied as 'local' are written alike; this one differs from the first: write it as",
        True,
    ),
    (
        "    - &a {attention: {heads: 2}, tie: local}\n    - *a\n",
        6,
        "nothing is searched here, so there is nothing to tie",
        True,
    ),
    ("    - {one_of: [{mamba: {}, tie: a}]}\n", 6, "'tie' is written beside 'one_of'", False),
    ("    - {one_of: [attention], tie: 3}\n", 6, "found 3; expected a name of letters", False),
    ("    - {tie: a}\n", 6, "found a mapping of tie; expected a mixer's name", False),
    (
        "    - parallel: {parts: [{one_of: [attention], tie: a}, mamba]}\n",
        6,
        "unknown key 'tie'; accepted: one_of",
        False,
    ),
]


def problems(folder: Path, text: str) -> tuple[Problem, ...]:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_study(path)
    return caught.value.problems


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(study_schema())


@pytest.mark.parametrize("row", BAD_STACKS, ids=[row[2][:40] for row in BAD_STACKS])
def test_a_mistake_in_a_stack_is_named_and_an_editor_sees_what_a_schema_can_say(
    tmp_path: Path, validator: Draft202012Validator, row: tuple[str, int, str, bool]
) -> None:
    layers, line, said, reader_only = row
    found = problems(tmp_path, STACK + layers)
    assert [problem.line for problem in found] == [line], found
    assert said in found[0].message
    data = read_yaml(tmp_path / "study.yaml").data
    assert validator.is_valid(data) == reader_only


def load(folder: Path, layers: str) -> ModelSpec:
    path = folder / "study.yaml"
    path.write_text(STACK + layers, encoding="utf-8")
    Draft202012Validator(study_schema()).validate(read_yaml(path).data)
    return load_study(path).model


def test_a_block_and_a_ratio_are_read_as_written(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """\
    - repeat: [2, 4]
      layers: [base_conv, {one_of: [{sliding_window: {window: [8, 16], heads: 1, kv_heads: 0}}]}]
      untied: [window]
    - ratio:
        of: 12
        mix:
          - {layer: attention, share: [1/2, 0, 1/8], place: [late, early]}
          - {layer: {one_of: [mamba, gla]}, share: 0.25}
        rest: {gated_delta: {head_dim: [8, 16]}}
        untied: [mixer, head_dim]
""",
    )
    block, ratio = model.layers
    assert isinstance(block, Block) and isinstance(ratio, Ratio)
    assert (block.repeat, block.untied, len(block.layers)) == ((2, 4), ("window",), 2)
    assert (ratio.of, ratio.untied) == ((12,), ("mixer", "head_dim"))
    first, second = ratio.mix
    assert (first.share, first.place) == ((0.0, 0.125, 0.5), ("early", "late"))
    assert (second.share, second.place) == ((0.25,), ("spread",))
    assert [option.mixer for option in second.layer.options] == ["mamba", "gla"]
    assert ratio.rest.options[0].fields == {"head_dim": (8, 16)}
    assert model.deepest == 2 * 4 + 12
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


def test_an_alias_with_a_tie_is_one_choice_in_two_places(tmp_path: Path) -> None:
    layers = "    - &local {sliding_window: {window: [8, 16, 32]}, tie: local}\n    - base_conv\n"
    model = load(tmp_path, layers + "    - *local\n")
    assert model.layers[0] == model.layers[2]
    assert count(model) == 3
    assert count(load(tmp_path, layers.replace(", tie: local", "") + "    - *local\n")) == 9


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("sliding_window: {window: {from: 16, to: 1024}}", (16, 32, 64, 128, 256, 512, 1024)),
        ("sliding_window: {window: {from: 8, to: 11, scale: linear}}", (8, 9, 10, 11)),
        ("sliding_window: {window: {from: 8, to: 24, step: 8}}", (8, 16, 24)),
        ("gated_delta: {head_dim: {from: 8, to: 64}}", (8, 16, 32, 64)),
        ("base_conv: {kernel: {from: 2, to: 5}}", (2, 3, 4, 5)),
        ("linear_attention: {feature_dim: {from: 8, to: 32, scale: log2}}", (8, 16, 32)),
    ],
)
def test_sizes_that_a_mixer_doubles_are_doubled_unless_said(
    tmp_path: Path, written: str, values: tuple[int, ...]
) -> None:
    (option,) = load(tmp_path, f"    - {{{written}}}\n").options
    (found,) = option.fields.values()
    assert found == values
