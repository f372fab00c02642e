"""The benchmark of training: both sides train the same, and its sums are right."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from archsearch.bench_trials import Pace, bench_text, bench_values
from archsearch.cli import app
from archsearch.errors import UsageError
from archsearch.study_file import load_study

STUDY = """\
study: bench
model:
  width: 16
  layers: [base_conv, {one_of: [attention, {sliding_window: {window: [4, 8]}}]}]
task:
  mqar:
    vocab_size: 32
    train: [{length: 16, pairs: 2, examples: 96}]
    test: [{length: 16, pairs: 2, examples: 64}]
train: {learning_rates: [1e-2, 1e-3], seeds: 2, epochs: 3, batch_size: 16}
objectives: {recall: maximize, state_bytes: minimize}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "bench.yaml"
    path.write_text(STUDY)
    return path


def test_a_member_recalls_what_a_model_trained_plainly_recalls(study: Path) -> None:
    values = bench_values(load_study(study), "largest", 3, 2, None)
    assert "attention" in values["architecture"]
    ours, plain = values["population"], values["plain_loop"]
    # 12 steps in fp32: a different order of sums changes no answer of 64 examples.
    assert values["recall_of_the_same_member"] == [ours["recall"][1][0], plain["recall"][1][0]]
    assert ours["recall"][1][0] == plain["recall"][1][0]
    assert [len(ours["recall"]), len(ours["recall"][0]), len(plain["recall"])] == [3, 4, 2]
    assert values["ratio"] == pytest.approx(ours["runs_per_hour"] / plain["runs_per_hour"])
    assert f"{values['ratio']:.1f}" in bench_text(values)


def test_an_hour_is_reckoned_from_what_was_timed_and_more_of_the_last() -> None:
    pace = Pace(4, 2, 1.0, (3.0, 2.0), ((0.5,) * 4, (0.6,) * 4), None)
    assert pace.runs_per_hour(2) == pytest.approx(3600 * 4 / 6)
    assert pace.runs_per_hour(5) == pytest.approx(3600 * 4 / 12)
    assert pace.runs_per_hour(1) == pytest.approx(3600 * 4 / 4)


def test_the_command_says_it_in_words_and_in_json(study: Path) -> None:
    given = ["bench", "trials", str(study), "--epochs", "1", "--plain-epochs", "1"]
    said = CliRunner().invoke(app, given)
    assert said.exit_code == 0 and "one plain model" in said.output
    plain = CliRunner().invoke(app, [*given, "--deterministic", "--json"])
    values = json.loads(plain.output)
    assert values["benchmark"] == "trials"
    # On a CPU sums have one order, whatever torch is told.
    assert values["deterministic"]["recall"] == values["population"]["recall"]


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--start", "middling"], "smallest, middle, largest"), (["--execution", "fast"], "captured")],
)
def test_a_wrong_option_says_what_is_accepted(study: Path, given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "trials", str(study), *given])
    assert result.exit_code == 2
    assert said in result.output


def test_what_the_plain_loop_cannot_do_is_refused(study: Path) -> None:
    study.write_text(
        STUDY.replace("batch_size: 16}", "batch_size: 16, objective: just_read_twice}")
    )
    with pytest.raises(UsageError, match=r"train\.objective"):
        bench_values(load_study(study), "largest", 1, 1, None)
