"""Mistakes in a study: each is named with its line, what was found and what would be accepted."""

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from archsearch.arch import ArchSpec
from archsearch.compose import count, walk
from archsearch.cost import known_metrics, parameters, violations
from archsearch.errors import Problem, SpecError
from archsearch.study_file import load_study, study_schema
from archsearch.study_file.checks import MAX_WALK
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
        - linear_attention: {feature_map: taylor, feature_dim: 8}
  channel_mixer: none
task:
  mqar:
    recipe: tiny
train:
  learning_rates: [1e-3, 1e-2]
  seeds: 2
objectives:
  recall: maximize
  state_bytes: {minimize: {context: 64}}
limits: {parameters: 2M}
search: {sampler: random, time: 30m}
resources: {gpus: 1}
tracking: {mlflow: none}
"""

LATENCY_BEFORE = "{parameters: 2M}\nsearch: {sampler: random, time: 30m}\nresources: {gpus: 1}"
LATENCY_AFTER = LATENCY_BEFORE.replace("parameters: 2M", "decode_ms: 5").replace("1}", "1/2}")

BAD = [
    # what is replaced, by what, the line, and what the message holds
    ("study: good", "", 2, "missing key 'study'; expected a name of letters"),
    ("study: good", "study: 2024", 1, "found 2024; expected a name", "in quotes"),
    ("study: good", "study: my study", 1, "found 'my study'; expected a name of letters, digits"),
    ("study: good", "study: |\n  good", 1, r"found 'good\n'; expected a name of letters"),
    ("study: good", "studi: good", 1, "unknown key 'studi'; accepted: study", "mean 'study'?"),
    ("seed: 1", "seed: -1", 2, "found -1; expected an integer from 0"),
    ("seed: 1", "seed: yes", 2, "found 'yes'; expected an integer"),
    ("seed: 1", "seed: 1\nseed: 2", 3, "key 'seed' is given twice, on line 2 and on line 3"),
    ("seed: 1", "seed: [1]", 2, "found a list of 1; expected an integer"),
    (
        "feature_map: taylor, feature_dim: 8",
        "feature_map: elu, max_len: [8, 16]",
        10,
        "makes no difference with feature_map elu, normalise true, fixed_decay false, head_mix",
        "leave it out",
    ),
    (
        "- attention\n",
        "- attention: {rope_base: 1e6}\n",
        8,
        "makes no difference with rope false, qk_norm false",
    ),
    (
        "    - base_conv\n",
        "    - gla: {gate_rank: 2e9}\n",
        6,
        "an integer of up to 1048576 of 'gate",
    ),
    ("width: 32", "width: 32.5", 4, "found 32.5; expected an integer from 1"),
    ("width: 32", "width: true", 4, "found true; expected an integer"),
    ("width: 32", "width: [32, 32]", 4, "32 is given twice in this list"),
    ("width: 32", "width: []", 4, "found an empty list; expected a list"),
    ("width: 32", "widht: 32", 4, "unknown key 'widht'", "mean 'width'?"),
    ("width: 32", "width: 10M", 4, "found '10M'; expected an integer from 1 to 65536"),
    ("width: 32", "repeat: 200", 4, "400 layers once repeated; at most 256"),
    ("    - base_conv\n", "    - base_konv\n", 6, "no mixer 'base_konv'", "mean 'base_conv'?"),
    ("    - base_conv\n", "    - none\n", 6, "'none' is an alternative of a one_of"),
    ("    - base_conv\n", "    - \n", 6, "found nothing; expected a mixer's name"),
    (
        "    - base_conv\n",
        "    - one_off: [attention]\n",
        6,
        "no mixer 'one_off'",
        "mean 'one_of'?",
    ),
    ("    - base_conv\n", "    - one_of: []\n", 6, "found an empty list; expected a list of"),
    ("    - base_conv\n", "    - {one_of: [attention], repeat: 2}\n", 6, "unknown key 'repeat'"),
    ("    - base_conv\n", "    - attention:\n      heads: 1\n", 6, "indent the fields below their"),
    (
        "    - base_conv\n",
        "    - attention: 1\n",
        6,
        "expected a mapping of fields of 'attention'",
    ),
    (
        "        - attention\n",
        "        - sliding_window\n",
        9,
        "'sliding_window' is an altern",
    ),
    ("heads: 1}", "haeds: 1}", 9, "unknown key 'haeds'; accepted: window", "mean 'heads'?"),
    ("[16, 8]", "[16, 8192]", 9, "found 8192; expected an integer from 4 to 4096"),
    ("[16, 8]", "[16, 8, 16]", 9, "16 is given twice"),
    ("[16, 8]", "[]", 9, "found an empty list; expected at least one value of 'window'"),
    ("[16, 8]", "wide", 9, "found 'wide'; expected an integer from 4 to 4096"),
    ("[16, 8]", "{from: 16, to: 8}", 9, "an empty range, from 16 to 8"),
    ("[16, 8]", "{from: 8, to: 16, step: 0}", 9, "found 0; expected an integer, 1 or more"),
    ("[16, 8]", "{from: 8, to: 8192, scale: log2}", 9, "found 8192; expected an integer from 4"),
    ("[16, 8]", "{from: 8}", 9, "missing key 'to'"),
    ("[16, 8]", "{from: 8, to: 16, scale: log}", 9, "expected one of linear, log2", "mean 'log2'?"),
    ("[16, 8]", "{from: 8, to: 16, step: 2, scale: log2}", 9, "a log2 range doubles; leave 'step'"),
    (
        "[16, 8]",
        "{from: 0, to: 16, scale: log2}",
        9,
        "a log2 range starts at 0; it must start",
    ),
    ("taylor,", "tailor,", 10, "found 'tailor'; expected one of taylor", "mean 'taylor'?"),
    ("taylor,", "{from: 1, to: 2},", 10, "from-to is for integers"),
    ("heads: 1}", "heads: 1, rope: yes}", 9, "found 'yes'; expected true or false for 'rope'"),
    ("    - base_conv\n", "    - attention: {heads: 3}\n", 6, "can be built", "divide the width"),
    ("    - base_conv\n", "    - rwkv4: {heads: 3}\n", 6, "unknown key 'heads'; accepted: none"),
    ("    - base_conv\n", "    - mamba: {dt_rank: 1e30}\n", 6, "an integer of up to 1048576"),
    ("channel_mixer: none", "channel_mixer: swiglo", 11, "found 'swiglo'", "mean 'swiglu'?"),
    ("channel_mixer: none", "channel_mixer: {swiglu: {ratio: 0}}", 11, "expected a ratio above 0"),
    ("channel_mixer: none", "channel_mixer: {swiglu: {ratio: 0.001}}", 11, "no inner feature"),
    (
        "channel_mixer: none",
        "channel_mixer: {one_of: [none, none]}",
        11,
        "'none' is an alternative",
    ),
    ("recipe: tiny", "recipe: tinny", 14, "expected one of tiny, zoology-figure2", "mean 'tiny'?"),
    ("recipe: tiny", "vocab_size: 64", 13, "without a recipe, these must be given: train, test"),
    ("recipe: tiny", "recipe: tiny\n    vocab_size: 10", 15, "a vocabulary of 10 has 4"),
    (
        "recipe: tiny",
        "recipe: tiny\n    test:\n      - {length: 32, pairs: 4, examples: 9}\n"
        "      - {length: 16, pairs: 8, examples: 9}",
        17,
        "8 pairs and their queries need a length of at least 32 tokens; found 16",
    ),
    (
        "recipe: tiny",
        "recipe: tiny\n    test:\n      - {length: 32, pairs: 4, examples: 9}\n"
        "      - {length: 32, pairs: 4, examples: 8}",
        17,
        "length 32 with 4 pairs is tested already",
    ),
    (
        "recipe: tiny",
        "recipe: tiny\n    test: [{length: 32, pears: 4, examples: 9}]",
        15,
        "mean 'pairs'?",
    ),
    ("recipe: tiny", "recipe: tiny\n    prompt: thrice", 15, "of plain, twice, question_first"),
    ("mqar:", "mkar:", 13, "unknown key 'mkar'; accepted: mqar", "mean 'mqar'?"),
    ("1e-3,", "0,", 16, "found 0; expected a number above 0"),
    ("1e-3,", "1e-2,", 16, "0.01 is given twice in this list"),
    ("1e-3,", ".inf,", 16, "found inf; expected a number above 0"),
    ("1e-3,", "1e-3x,", 16, "found '1e-3x'; expected a number above 0"),
    ("seeds: 2", "seeds: 0", 17, "found 0; expected an integer from 1"),
    ("seeds: 2", "precision: fp16", 17, "expected one of fp32, tf32, bf16", "mean 'bf16'?"),
    ("seeds: 2", "betas: [0.9]", 17, "found a list of 1; expected a list of two numbers"),
    ("seeds: 2", "betas: [0.9, 1]", 17, "found 1; expected a number from 0 to below 1"),
    ("seeds: 2", "objective: just_read_twise", 17, "expected next_token", "'just_read_twice'?"),
    ("seeds: 2", "objective: {just_read_twice: {mask_share: 1}}", 17, "found 1; expected a number"),
    ("seeds: 2", "objective: {just_read_twice: {mask_weight: -1}}", 17, "a number, 0 or more"),
    ("seeds: 2", "objective: {just_read_twice: {share: 0.2}}", 17, "unknown key 'share'"),
    ("seeds: 2", "objective: {next_token: {}}", 17, "found a mapping of next_token; expected"),
    ("seeds: 2", "objective: {just_read_twice: {prefix: 0}}", 17, "found 0; expected an integer"),
    (
        "seeds: 2",
        "objective: {just_read_twice: {prefix: 31}}",
        17,
        "found a prefix of 31 tokens; expected at most 30, where the last query of a training",
    ),
    ("seeds: 2", "grad_clip: null", 17, "found nothing; expected a number above 0, or none"),
    ("recall: max", "recall: min", 19, "'recall' can only be maximized; found minimize"),
    ("recall: maximize", "recal: maximize", 19, "unknown key 'recal'", "mean 'recall'?"),
    ("recall: maximize", "recall: {maximize: {context: 8}}", 19, "unknown key 'context'"),
    ("recall: maximize", "recall: maximise", 19, "found 'maximise'", "mean 'maximize'?"),
    (
        "recall: maximize",
        "recall: maximize\n  decode_ms: minimize\n  prefill_ms: minimize\n  parameters: minimize",
        18,
        "5 objectives; expected 1 to 4",
    ),
    ("{context: 64}", "{context: 0}", 20, "found 0; expected an integer from 1"),
    ("parameters: 2M", "parameters: 2m", 21, "found '2m'", "did you mean 'M'?"),
    ("parameters: 2M", "recall: 0.9", 21, "a limit is an upper bound, and more recall is better"),
    ("parameters: 2M", "state_bytes: 512K", 21, "unknown unit 'K'", "512KiB"),
    ("parameters: 2M", "parameters: 2M, state_bytes: {context: 9}", 21, "missing key 'maximum'"),
    ("parameters: 2M", "parameters: 100", 21, "excludes every architecture", "a limit of 100, but"),
    ("parameters: 2M", "state_bytes: 1", 21, "excludes every architecture", "at context 64"),
    ("sampler: random", "sampler: randon", 22, "expected one of auto, evolution", "mean 'random'?"),
    ("time: 30m", "time: 30", 22, "found 30; expected a duration with its unit, such as 90s"),
    ("time: 30m", "time: 30x", 22, "unknown unit 'x'"),
    ("time: 30m", "warm_start: [{study: a, trial: 3}]", 22, "'trial'", "mean 'trials'?"),
    ("time: 30m", "warm_start: [smalest]", 22, "found 'smalest'", "mean 'smallest'?"),
    ("time: 30m", "early_stopping: hyperband", 22, "found 'hyperband'; expected none, asha, or a"),
    ("time: 30m", "early_stopping: {reduction: 1}", 22, "found 1; expected a number above 1"),
    ("time: 30m", "early_stopping: {grace: 1}", 22, "found 1; expected a share of the training"),
    ("time: 30m", "early_stopping: {grase: 0}", 22, "unknown key 'grase'", "mean 'grace'?"),
    (
        "time: 30m",
        "early_stopping: {grace: 0.8}",
        22,
        "found early stopping with train.rungs 3, none of which lies between the grace (0.8 of",
    ),
    ("gpus: 1", "gpus: 0.33", 23, "found 0.33; expected a whole number of GPUs", "written 1/3"),
    (LATENCY_BEFORE, LATENCY_AFTER, 23, "decode_ms cannot be measured on a GPU that others use"),
    ("gpus: 1", "gpus: 2/3", 23, "found '2/3'; expected a whole number of GPUs"),
    ("gpus: 1", "gpus: 1.5", 23, "found 1.5; expected a whole number of GPUs"),
    ("mlflow: none", "storage: archsearch.db", 24, "expected a database URL, such as sqlite:///"),
    ("mlflow: none", "mlflow: false", 24, "found false; expected an MLflow tracking URI, or none"),
    (
        "tracking: {mlflow: none}",
        "tracking: none",
        24,
        "expected a mapping with keys storage",
    ),
]


def problems(folder: Path, text: str) -> tuple[Problem, ...]:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_study(path)
    assert caught.value.exit_code == 2
    assert [each.name for each in folder.iterdir()] == ["study.yaml"], "something was written"
    return caught.value.problems


def test_the_table_starts_from_a_good_study(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_study(path).study == "good"


@pytest.mark.parametrize("row", BAD, ids=[re.sub(r"\s+", " ", str(row[1]))[:40] for row in BAD])
def test_a_mistake_is_named_with_its_line(tmp_path: Path, row: tuple[str | int, ...]) -> None:
    old, new, line, *said = row
    assert GOOD.count(str(old)) == 1, f"{old!r} must stand in the good study once"
    found = problems(tmp_path, GOOD.replace(str(old), str(new)))
    assert len(found) == 1, found
    assert found[0].line == line, found
    for words in said:
        assert str(words) in found[0].message


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(study_schema())


READER_ONLY = {
    LATENCY_AFTER,
    "early_stopping: {grace: 0.8}",
    "feature_map: elu, max_len: [8, 16]",
    "- attention: {rope_base: 1e6}\n",
    "study: |\n  good",
    "repeat: 200",
    "    - attention: {heads: 3}\n",
    "        - sliding_window\n",
    "{from: 16, to: 8}",
    "{from: 8, to: 8192, scale: log2}",
    "{from: 8, to: 16, step: 2, scale: log2}",
    "{from: 0, to: 16, scale: log2}",
    "channel_mixer: {swiglu: {ratio: 0.001}}",
    "channel_mixer: {one_of: [none, none]}",
    "vocab_size: 64",
    "recipe: tiny\n    vocab_size: 10",
    "objective: {just_read_twice: {prefix: 31}}",
    "parameters: 100",
    "state_bytes: 1",
    "gpus: 0.33",
    "gpus: 1.5",
    "width: 10M",
    ".inf,",
}
"""Mistakes between several keys, which a schema cannot say."""


@pytest.mark.parametrize("row", BAD, ids=[re.sub(r"\s+", " ", str(row[1]))[:40] for row in BAD])
def test_an_editor_sees_the_mistakes_that_a_schema_can_say(
    tmp_path: Path, validator: Draft202012Validator, row: tuple[str | int, ...]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(GOOD.replace(str(row[0]), str(row[1])), encoding="utf-8")
    try:
        data = read_yaml(path).data
    except SpecError:
        return  # no YAML at all, which an editor sees by itself
    spans = row[1] in READER_ONLY or "tested already" in str(row[3]) or "queries" in str(row[3])
    assert validator.is_valid(data) == spans


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- study: x\n", "found a list of 1; expected a mapping with keys study, seed"),
        ("just text\n", "found 'just text'; expected a mapping with keys"),
        ("study: x\n", "missing key 'model'"),
        ("study: x\nmodel:\ntask: {mqar: tiny}\n", "missing key 'layers'"),
        ("study: x\nmodel: {layers: attention}\ntask: {mqar: tiny}\n", "expected a list of layers"),
        ("study: x\nmodel: {layers: []}\ntask: {mqar: tiny}\n", "expected a list of layers"),
        ("study: x\nmodel: {layers: [attention]}\ntask:\n", "missing key 'mqar'"),
    ],
)
def test_a_file_that_is_hardly_a_study_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in problem.message for problem in problems(tmp_path, text))


def one_layer(alternatives: str, limits: str) -> str:
    return (
        f"study: s\nmodel: {{width: 32, layers: [{{one_of: [{alternatives}]}}]}}\n"
        f"task: {{mqar: tiny}}\nlimits: {{{limits}}}\n"
    )


def test_limits_that_no_architecture_meets_together_are_refused(tmp_path: Path) -> None:
    # The window keeps less, the linear map has fewer parameters; neither has the least of both.
    window = "{sliding_window: {window: 8, heads: 1}}"
    linear = "{linear_attention: {feature_map: taylor, feature_dim: 8, heads: 1}}"
    path = tmp_path / "study.yaml"
    path.write_text(one_layer(f"{window}, {linear}", "parameters: 1G"), encoding="utf-8")
    spec = load_study(path)
    known = [known_metrics(one.arch, spec) for one in walk(spec.model)]
    fewest = min(each["parameters"] for each in known)
    least = min(each["state_bytes"] for each in known)
    assert not any((k["parameters"], k["state_bytes"]) == (fewest, least) for k in known)
    limits = f"parameters: {fewest:.0f}, state_bytes: {least:.0f}"
    (problem,) = problems(tmp_path, one_layer(f"{window}, {linear}", limits))
    assert (problem.line, problem.path) == (4, "limits")
    assert "no architecture is within all limits at once" in problem.message
    assert f"state_bytes {least:,.0f}, parameters {fewest:,.0f}" in problem.message


def test_the_smallest_architecture_of_a_large_space_is_found(tmp_path: Path) -> None:
    layer = "{one_of: [attention, sliding_window, linear_attention, gated_delta]}"
    text = "study: s\nmodel: {width: 32, layers: [%s]}\ntask: {mqar: tiny}\nlimits: {%s}\n"
    path = tmp_path / "study.yaml"
    path.write_text(text % (layer, ""), encoding="utf-8")
    spec = load_study(path)
    vocabulary = spec.task.vocab_size
    built = [one.arch for one in walk(spec.model) if not violations(one.arch, spec)]
    smallest = min(built, key=lambda arch: parameters(arch, vocabulary))
    thrice = smallest.model_copy(update={"layers": smallest.layers * 3})
    fewest = parameters(ArchSpec.model_validate(thrice.model_dump()), vocabulary)
    path.write_text(text % (", ".join([layer] * 3), f"parameters: {fewest}"), encoding="utf-8")
    assert count(load_study(path).model) > MAX_WALK, "the space would be walked whole"
    path.write_text(text % (", ".join([layer] * 3), f"parameters: {fewest - 1}"), encoding="utf-8")
    with pytest.raises(SpecError, match=f"but the smallest has {fewest:,}"):
        load_study(path)


def test_models_that_no_device_can_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "study: large\nmodel:\n  width: 65536\n  layers: [{gla: {gate_rank: 1048576}}]\n"
        "task: {mqar: tiny}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_study(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.path) == (4, "model.layers")
    assert "parameters would take 448GiB; no device holds more than 256GiB" in problem.message
