"""A mixer that is made of mixers, wherever layers are read, hashed, chosen, shown or sent."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from one_off import one_off, stored_arch
from samples import sample_spec, sample_study, sample_trial

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.architectures.project import project
from archsearch.compose import Assignment, compose, count, draw, walk
from archsearch.display import architecture, brief
from archsearch.errors import SpecError
from archsearch.messages import ProfileSpec, TrialRequest, read_request
from archsearch.model import LanguageModel, resolve_backends
from archsearch.preview import preview_text
from archsearch.propose.corners import warm_start
from archsearch.propose.sampler import Proposer
from archsearch.records import TrialState
from archsearch.report.values import families, family, page_values, styles
from archsearch.space import Value
from archsearch.spec import StudySpec
from archsearch.study_file import load_study, study_schema
from archsearch.tables import trial_text
from archsearch.tracking.encoding import encodings, parameters_of
from archsearch.yaml_file import read_yaml

STUDY = """\
study: hybrids
model:
  width: 16
  layers:
    - base_conv
    - one_of:
        - attention: {heads: 1, kv_heads: 0}
        - parallel:
            parts:
              - sliding_window: {window: [16, 64]}
              - one_of: [{mlp: {ratio: 1}}, {swiglu: {ratio: [1, 2]}}]
            merge: [mean, weights]
            share: 0.5
task: {mqar: tiny}
search: {warm_start: [smallest, largest]}
"""


def read(folder: Path, text: str = STUDY) -> StudySpec:
    path = folder / "study.yaml"
    path.write_text(text)
    return load_study(path)


def layer(mixer: str, *parts: LayerSpec, **fields: Value) -> LayerSpec:
    return LayerSpec(mixer=mixer, fields=fields, parts=parts)


def arch(*layers: LayerSpec) -> ArchSpec:
    return ArchSpec(width=16, layers=layers)


ATTENTION, DELTA, WINDOW = layer("attention"), layer("gated_delta"), layer("sliding_window")


def test_an_architecture_without_parts_says_nothing_of_them() -> None:
    """Hashes of what was trained before are as they were."""
    plain = arch(ATTENTION, layer("base_conv"))
    assert "parts" not in plain.canonical_json
    assert "parts" not in sample_spec().canonical_json


@pytest.mark.parametrize("merge", ["mean", "weights"])
def test_parts_that_are_merged_alike_have_no_order(merge: str) -> None:
    one, other = (
        arch(layer("parallel", *parts, merge=merge))
        for parts in ((ATTENTION, DELTA), (DELTA, ATTENTION))
    )
    assert one.arch_hash == other.arch_hash
    assert one.arch_hash != arch(layer("parallel", ATTENTION, WINDOW, merge=merge)).arch_hash


def test_heads_are_turned_round_with_their_share() -> None:
    def heads(*parts: LayerSpec, share: float) -> LayerSpec:
        return layer("parallel", *parts, merge="heads", share=share).canonical(16)

    first = heads(DELTA, ATTENTION, share=0.7)
    assert first == heads(ATTENTION, DELTA, share=0.3) and first.fields["share"] == 5 / 16
    assert first != heads(DELTA, ATTENTION, share=0.3)
    assert heads(DELTA, DELTA, share=0.75) == heads(DELTA, DELTA, share=0.25)
    three = heads(WINDOW, DELTA, ATTENTION, share=0.5)
    assert [part.mixer for part in three.parts] == ["sliding_window", "attention", "gated_delta"]
    alike = heads(WINDOW, DELTA, ATTENTION, WINDOW, share=0.25)
    assert [part.mixer for part in alike.parts][:2] == ["attention", "gated_delta"]


def test_a_share_counts_with_heads_alone() -> None:
    one, other = (layer("parallel", ATTENTION, DELTA, share=share) for share in (0.25, 0.5))
    assert one != other and arch(one) == arch(other)


def test_what_is_left_out_is_filled_in() -> None:
    bare = layer("parallel")
    assert bare == layer("parallel", DELTA, WINDOW, merge="mean")
    assert bare.parts[1].fields["window"] == 64


def test_an_architecture_comes_back_from_its_json() -> None:
    hybrid = arch(layer("parallel", WINDOW, DELTA, merge="heads", share=0.25))
    plain = json.loads(hybrid.canonical_json)
    for again in (ArchSpec.from_stored(plain), ArchSpec.model_validate(plain)):
        assert again.arch_hash == hybrid.arch_hash
        assert again.summary == hybrid.summary
        assert again.configs() == hybrid.configs()


def test_a_study_reads_and_agrees_with_the_schema(tmp_path: Path) -> None:
    spec = read(tmp_path)
    (attention, hybrid) = spec.model.layers[1].options
    assert attention.parts == ()
    window, searched = hybrid.parts
    assert [(one.mixer, one.fields) for one in window.options] == [
        ("sliding_window", {"window": (16, 64)})
    ]
    assert [one.mixer for one in searched.options] == ["mlp", "swiglu"]
    assert hybrid.fields == {"merge": ("mean", "weights"), "share": (0.5,)}
    Draft202012Validator(study_schema()).validate(read_yaml(tmp_path / "study.yaml").data)
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec


WRONG = [
    ("{parts: [attention]}", "parts: found a list of 1; expected a list of at least two parts"),
    ("{parts: attention}", "parts: found 'attention'; expected a list of at least two parts"),
    ("{parts: [attention, parallel]}", "parts[1]: found 'parallel', which has parts itself"),
    ("{parts: [attention, {parallel: {}}]}", "parts[1].parallel: found 'parallel', which has"),
    ("{parts: [attention, none]}", "parts[1]: 'none' cannot be a part"),
    ("{parts: [attention, {one_of: [mamba, none]}]}", "parts[1].one_of[1]: 'none' cannot be"),
    ("{parts: [attention, mambo]}", "did you mean 'mamba'?"),
    ("{parts: [attention, {attention: {head: 1}}]}", "unknown key 'head'; accepted: heads,"),
    ("{part: [attention, mamba]}", "unknown key 'part'; accepted: merge, share, parts; did you"),
    ("{merge: sum}", "merge: found 'sum'; expected one of mean, weights, heads of 'merge'"),
    ("{share: 0.25}", "share: makes no difference with merge mean; leave it out"),
    ("{merge: heads, share: 2}", "share: found 2; expected a number from 0.25 to 0.75"),
    ("{parts: [mamba, {attention: {heads: 3}}]}", "no choice of this layer can be built: mixer"),
]


@pytest.mark.parametrize(("written", "said"), WRONG)
def test_mistakes_are_said_at_their_place(tmp_path: Path, written: str, said: str) -> None:
    text = f"study: wrong\nmodel:\n  layers:\n    - parallel: {written}\ntask: {{mqar: tiny}}\n"
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert [problem.line for problem in caught.value.problems] == [4]
    assert said in str(caught.value)


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    validator = Draft202012Validator(study_schema())
    for own in ({}, {"plugins": ["./mine.py"]}):
        for parts in (["attention"], ["attention", "parallel"], ["attention", "none"]):
            layers: list[Any] = [{"parallel": {"parts": parts}}]
            study = {"study": "x", "model": {"layers": layers}, "task": {"mqar": "tiny"}, **own}
            assert not validator.is_valid(study), (own, parts)
            layers[0]["parallel"]["parts"] = ["attention", {"one_of": ["mamba"]}]
            assert validator.is_valid(study)


def test_every_choice_has_a_name_of_its_own(tmp_path: Path) -> None:
    model = read(tmp_path).model
    model = model.model_copy(update={"layers": model.layers[1:] * 2})
    asked: list[str] = []

    def choose(name: str, candidates: tuple[Value, ...]) -> Value:
        asked.append(name)
        return candidates[-1]

    compose(model, choose)
    within = "layer0.parallel"
    assert asked[: len(asked) // 2] == [
        "layer0.mixer",
        f"{within}.part0.sliding_window.window",
        f"{within}.part1.mixer",
        f"{within}.part1.swiglu.ratio",
        f"{within}.merge",
    ]
    assert len(asked) == len(set(asked))


def test_count_and_walk_agree(tmp_path: Path) -> None:
    model = read(tmp_path).model
    walked = list(walk(model))
    assert count(model) == len(walked) == 1 + 2 * 2 * (1 + 2)
    assert len({one.arch.arch_hash for one in walked}) == len(walked)


def test_every_sampler_proposes_parts(tmp_path: Path) -> None:
    spec = read(tmp_path)
    walked = {draw(spec.model, random.Random(seed)).arch.layers[1].label for seed in range(20)}
    for name in ("tpe", "random", "nsga2", "evolution"):
        proposer = Proposer(spec, {"name": name, "population": 8})
        proposed = [proposer.ask() for _ in range(12)]
        assert {one.arch.layers[1].label for one in proposed} <= walked
        again = Proposer(spec, {"name": name, "population": 8})
        placed = [again.place(one.params, one.notes) for one in proposed]
        assert [one.arch for one in placed] == [one.arch for one in proposed]


def test_a_study_begins_with_its_corners(tmp_path: Path) -> None:
    smallest, largest = warm_start(read(tmp_path))
    windows = [
        one.fields["window"]
        for arch in (smallest.arch, largest.arch)
        for one in arch.layers[1].nested
        if one.mixer == "sliding_window"
    ]
    assert windows[0] == 16 and windows[1:] in ([], [64])


def test_a_published_hybrid_is_projected_part_by_part(tmp_path: Path) -> None:
    model = read(tmp_path).model
    published = arch(layer("parallel", layer("sliding_window", window=48), DELTA, merge="weights"))
    found: Assignment = project(model, published)
    hybrid = found.arch.layers[1]
    assert hybrid.label == "parallel(mlp+sliding_window)"
    assert (hybrid.fields["merge"], hybrid.parts[1].fields["window"]) == ("weights", 64)


def test_every_part_calls_the_backend_that_was_resolved() -> None:
    hybrid = arch(layer("parallel", WINDOW, DELTA))
    backends = resolve_backends(hybrid, "cpu", torch.float32)
    assert {"sliding_window", "gated_delta", "short_conv"} <= {*backends}
    model = LanguageModel(hybrid, 32)
    model.use_backends(dict.fromkeys(backends, "chosen"))
    parts = model.get_submodule("blocks.0.mixer.parts").children()
    assert {backend for part in parts for backend in part.backends.values()} == {"chosen"}  # type: ignore[union-attr]


def test_parts_are_shown(tmp_path: Path) -> None:
    spec = read(tmp_path)
    hybrid = layer("parallel", layer("sliding_window", window=16), layer("swiglu", ratio=2.0))
    chosen = ArchSpec(width=16, layers=(layer("base_conv"), hybrid))
    line = "parallel(sliding_window(window=16)+swiglu(ratio=2.0), merge=mean)"
    assert architecture(spec, chosen) == f"base_conv > {line}"
    assert brief(spec, chosen) == line
    assert "(attention | parallel(sliding_window+(mlp | swiglu)))" in preview_text(spec)


def test_a_fixed_hybrid_with_searched_parts_is_shown(tmp_path: Path) -> None:
    text = "    - parallel: {parts: [{sliding_window: {window: [16, 64]}}, mamba]}"
    head, tail = STUDY.split("    - one_of:")[0], STUDY[STUDY.index("task:") :]
    spec = read(tmp_path, f"{head}{text}\n{tail}")
    shown = {brief(spec, one.arch) for one in walk(spec.model)}
    assert shown == {f"parallel(mamba+sliding_window(window={size}))" for size in (16, 64)}


def test_a_chart_has_the_same_columns_for_all(tmp_path: Path) -> None:
    spec = read(tmp_path)
    every = [one.arch for one in walk(spec.model)]
    rows = [parameters_of(spec, one) for one in every]
    assert all(row.keys() == rows[0].keys() for row in rows)
    columns = {row["layer1.mixer"]: row for row in rows}
    hybrid, plain = columns["parallel(mlp+sliding_window)"], columns["attention"]
    assert (hybrid["layer1.part1.mixer"], hybrid["layer1.part1.window"]) in {
        ("sliding_window", "16"),
        ("sliding_window", "64"),
    }
    assert (plain["layer1.part1.mixer"], plain["layer1.part1.window"]) == ("none", "0")
    numbers = [encodings(spec, one) for one in every]
    assert all(row.keys() == numbers[0].keys() for row in numbers)
    assert {row["arch/sliding_window.window"] for row in numbers} == {0.0, 16.0, 64.0}
    assert {row["arch/count/swiglu"] for row in numbers} == {0.0, 1.0}


def test_a_report_has_a_family_for_each_set_of_parts(tmp_path: Path) -> None:
    spec = read(tmp_path)
    hybrids = ["parallel(mlp+sliding_window)", "parallel(sliding_window+swiglu)"]
    assert families(spec) == ["attention", *hybrids, "base_conv"]
    study = replace(sample_study(), spec=spec)
    every = [one.arch for one in walk(spec.model)]
    trials = [sample_trial(study, i, one, TrialState.COMPLETE) for i, one in enumerate(every)]
    assert {family(spec, trial.arch) for trial in trials} <= {*families(spec)}
    assert {*styles(spec, trials)} == {*families(spec)}
    values = page_values(study, trials)
    assert {*values["shares"][1]["on"], *values["shares"][1]["off"]} <= {*families(spec)}
    shown = trial_text(study, trials[-1], None)
    assert "layer 1: parallel (merge " in shown and "  part 0: sliding_window (" in shown


def test_a_part_of_ones_own_is_sent_and_told_apart() -> None:
    """The code of a request names plugins within layers, and as channel mixers."""
    plugin = one_off("one_off_part")
    (own,) = stored_arch("one_off_part").layers
    hybrid = LayerSpec.model_construct(mixer="parallel", fields={}, parts=(own, ATTENTION))
    within = ArchSpec.model_construct(width=16, layers=(hybrid,), channel_mixer=ChannelSpec())
    kind = ChannelSpec.model_construct(kind="one_off_part", ratio=1.0)
    after = ArchSpec.model_construct(width=16, layers=(ATTENTION,), channel_mixer=kind)
    spec = sample_spec()
    for one, used in ((within, True), (after, True), (arch(ATTENTION), False)):
        request = TrialRequest(
            study="s",
            number=0,
            token="t",
            arch=one,
            task=spec.task,
            train=spec.train,
            profile=ProfileSpec(prefill=(), decode=(), exclusive=False),
            seed=0,
            device="cpu",
            plugins=(plugin,),
        )
        assert (plugin.digest in request.code) is used
        assert read_request(request.model_dump_json()).arch == one
