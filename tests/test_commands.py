"""Commands on a study that does not run, and what happens when the output or a file is broken."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import samples
import sqlalchemy as sa
from click.testing import Result
from safetensors.torch import save
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.coordinator.interrupts import Interrupts
from archsearch.model import LanguageModel
from archsearch.records import StudyRecord, TrialState
from archsearch.store import Store
from archsearch.store.tables import evaluations

ARCHSEARCH = [sys.executable, "-m", "archsearch"]


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyRecord]:
    """One study that has ended, in the default database of the folder."""
    monkeypatch.chdir(tmp_path)
    study = samples.sample_study(folder=tmp_path)
    with Store("sqlite:///archsearch.db", create=True) as store:
        ledger = samples.begin(store, study)
        samples.add(store, ledger, samples.sample_trials(study, 24))
        ledger.release("trials", 131.0)
        yield store.study("sample")


def test_pause_and_stop_of_what_does_not_run_say_so(stored: StudyRecord) -> None:
    for command in ("pause", "stop"):
        result = invoke(command)
        assert (result.exit_code, result.output) == (0, "study 'sample' is not running\n")
        assert invoke(command, "sampel").exit_code == 2


def test_resume_of_a_study_that_runs_starts_no_second_coordinator(stored: StudyRecord) -> None:
    with Store("sqlite:///archsearch.db") as store:
        samples.begin(store, stored)
        result = invoke("resume")
        assert result.exit_code == 0 and "study 'sample' is running: " in result.output
        assert "pauses" in invoke("pause").output
        assert "paused (" in invoke("status").output
        assert "study 'sample' goes on: " in invoke("resume").output
        assert "running (" in invoke("status").output


def test_budget_is_shown_and_changed(stored: StudyRecord) -> None:
    values = json.loads(invoke("budget", "--json").stdout)
    assert values["time_s"] == {"limit": None, "spent": 131.0}
    changes = ("--trials", "99", "--time", "2h", "--device-time", "3h", "--failures", "7")
    text = invoke("budget", "sample", *changes, "--parallel", "3").stdout
    lines = {line.split()[0]: line.split()[-1] for line in text.splitlines()}
    assert lines == {
        "budget": "limit",
        "trials": "99",
        "time": "2h",
        "device": "3h",
        "failures": "7",
        "parallel": "3",
    }
    invoke("budget", "--time", "none", "--failures", "none")
    with Store("sqlite:///archsearch.db") as store:
        search = store.study("sample").spec.search
        assert store.study("sample").spec.identity == stored.spec.identity
    kept = (search.trials, search.time_s, search.device_time_s, search.failures)
    assert kept == (99, None, 10800.0, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("budget --time soon", "--time: 'soon'"),
        ("budget --failures 0", "accepted: a whole number above 0, or none"),
        ("budget --trials 0", "greater than or equal to 1"),
        ("retry sample --class tired", "'timed_out'"),
        ("retry sample 0", "these are no failed trials: 0"),
        ("run study.yaml --storage none", "'none' is not a database URL"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(
    stored: StudyRecord, tmp_path: Path, arguments: str, said: str
) -> None:
    (tmp_path / "study.yaml").write_text(
        "study: s\nmodel: {layers: [base_conv]}\ntask: {mqar: tiny}\n"
    )
    result = invoke(*arguments.split())
    assert result.exit_code in (2, 4) and said in result.stderr
    assert "Traceback" not in result.stderr


def test_retry_says_what_is_evaluated_again(stored: StudyRecord) -> None:
    with Store("sqlite:///archsearch.db") as store:
        trials = store.trials("sample")
        failed = [one for one in trials if one.state is TrialState.FAILED]
        kind = str(failed[0].failure)
        result = invoke("retry", "sample", str(failed[0].number), "--class", kind)
        assert f"trials {failed[0].number} are evaluated again by" in result.output
        assert store.trial("sample", failed[0].number).state is TrialState.PENDING
        assert [one.number for one in store.unpublished("sample")] == [
            one.number for one in trials if one is not failed[0]
        ]
        assert invoke("retry", "sample").exit_code == 0
        assert invoke("retry", "sample").output == "study 'sample' has no failed trial\n"


def test_export_refuses_weights_that_are_not_those_of_the_trial(
    stored: StudyRecord, tmp_path: Path
) -> None:
    with Store("sqlite:///archsearch.db") as store:
        trial = next(one for one in store.trials("sample") if one.feasible)
        weights = save(LanguageModel(trial.arch, stored.spec.vocab_size).state_dict())
        path = tmp_path / "weights.safetensors"
        path.write_bytes(weights)
        known = {"weights_path": str(path), "weights_sha256": hashlib.sha256(weights).hexdigest()}
        with store.database.writing() as connection:
            connection.execute(sa.update(evaluations).values(**known))
    assert invoke("export", str(trial.number), "good").exit_code == 0
    path.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    result = invoke("export", str(trial.number), "bad")
    assert result.exit_code == 4
    assert f"does not hold the weights of trial {trial.number}: its SHA-256 is" in result.stderr
    assert not (tmp_path / "bad").exists()


def test_reading_a_database_of_optuna_alone_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = optuna.storages.RDBStorage("sqlite:///archsearch.db")
    optuna.create_study(storage=storage, study_name="theirs")
    storage.remove_session()
    storage.engine.dispose()

    def tables() -> set[str]:
        engine = sa.create_engine("sqlite:///archsearch.db")
        names = set(sa.inspect(engine).get_table_names())
        engine.dispose()
        return names

    before = tables()
    assert invoke("status").exit_code == 0
    for arguments in ("status theirs", "front", "front theirs", "stop theirs", "sync theirs"):
        result = invoke(*arguments.split())
        assert (result.exit_code, "holds no study yet" in result.stderr) == (2, True), arguments
    assert tables() == before


@pytest.mark.parametrize("command", ["schema", "mixers", "--help"])
def test_output_that_nobody_reads_ends_quietly(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*ARCHSEARCH, command], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["schema", "--version"])
def test_output_to_a_full_device_is_said_in_a_sentence(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*ARCHSEARCH, command], stdout=full, stderr=subprocess.PIPE)
    said = b"archsearch: standard output cannot be written: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (4, said)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.wanted
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.wanted
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.wanted
    finally:
        signal.signal(signal.SIGHUP, before)
