"""Every command that reads: what it prints, its exit code, and that it never makes a database."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples
from click.testing import Result
from typer.testing import CliRunner

from archsearch import __version__
from archsearch.catalogue import mixers_values
from archsearch.checks import Check
from archsearch.cli import app
from archsearch.front import ranked
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.registry import mixer_names
from archsearch.store import Store
from archsearch.study_file import study_schema

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

STUDIES = Path(__file__).parent.parent / "studies"


def invoke(*arguments: str) -> Result:
    """Run a command in this process; anything but a clean exit is an error here."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHSEARCH_STORAGE", raising=False)
    return tmp_path


@pytest.fixture
def stored(folder: Path) -> Iterator[tuple[StudyRecord, list[TrialRecord]]]:
    """One study in the default database of the folder."""
    study = samples.sample_study(folder=folder)
    with Store("sqlite:///archsearch.db", create=True) as store:
        ledger = samples.begin(store, study)
        samples.add(store, ledger, samples.sample_trials(study, 24))
        ledger.release("trials", 131.0)
        yield store.study("sample"), store.trials("sample")


def first(trials: list[TrialRecord], state: TrialState) -> TrialRecord:
    return next(trial for trial in trials if trial.state is state)


def test_help_is_quick_and_names_every_command() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [Path(sys.executable).parent / "archsearch", "--help"], capture_output=True, text=True
    )
    assert time.monotonic() - began < 5  # under a second alone; tests share the machine
    assert done.returncode == 0
    commands = "run status front show export sync mixers check schema ui"
    assert all(f"  {name} " in done.stdout for name in commands.split())
    for code in (0, 1, 2, 3, 4, 5, 130):
        assert f"{code} " in " ".join(done.stdout.split("Exit codes:")[1].split())


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom archsearch.cli import app\n"
        "try: app(['front', '--help'])\nexcept SystemExit: pass\n"
        "heavy = ['torch', 'ray', 'mlflow', 'optuna', 'sqlalchemy', 'matplotlib', 'rich']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    assert invoke("--version").output == f"archsearch {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    ["status", "status x", "front", "front x --json", "show 0", "export 0 out", "sync", "ui"],
)
def test_reading_without_a_database_is_an_error_that_makes_none(
    folder: Path, arguments: str
) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 4
    assert "archsearch.db" in result.stderr and "archsearch run" in result.stderr
    assert result.stdout == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("front sampel", "did you mean 'sample'?"),
        ("status sampel", "did you mean 'sample'?"),
        ("show 24", "numbers 0 to 23"),
        ("show 0 --study other", "its studies: sample"),
        ("front --plot front.svg", "accepted: .png, .html"),
        ("front --plot no/folder.png", "cannot be written"),
        ("front missing.yaml", "missing.yaml"),
        ("run missing.yaml", "missing.yaml"),
        ("show nothing", "found 'nothing'; accepted: the number of a trial, or 'arch'"),
        ("show arch nothing", "no architecture 'nothing'"),
        ("front --nothing", "No such option"),
        ("sync --mlflow none", "--mlflow"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(stored: object, arguments: str, said: str) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_front_json_is_the_front(stored: tuple[StudyRecord, list[TrialRecord]]) -> None:
    study, trials = stored
    values = json.loads(invoke("front", "--json").stdout)
    members = {trial.number: trial for trial, rank in ranked(study, trials) if rank == 0}
    assert [row["number"] for row in values["front"]] == list(members)
    for row in values["front"]:
        assert row["metrics"] == members[row["number"]].metrics
        assert row["arch_hash"] == members[row["number"]].arch.arch_hash


def test_front_table_has_a_row_for_each_member(
    stored: tuple[StudyRecord, list[TrialRecord]],
) -> None:
    study, trials = stored
    lines = invoke("front").stdout.splitlines()
    members = [trial for trial, rank in ranked(study, trials) if rank == 0]
    assert lines[0].split()[:4] == ["trial", "recall", "spread", "state"]
    assert [int(line.split()[0]) for line in lines[1 : len(members) + 1]] == [
        trial.number for trial in members
    ]


def test_study_can_be_named_by_name_file_or_not_at_all(stored: object, folder: Path) -> None:
    text = (STUDIES / "quickstart.yaml").read_text()
    (folder / "sample.yaml").write_text(text.replace("study: quickstart", "study: sample"))
    shown = {invoke("front", *name).stdout for name in ([], ["sample"], ["sample.yaml"])}
    assert len(shown) == 1


def test_several_studies_must_be_told_apart(stored: object, folder: Path) -> None:
    with Store("sqlite:///archsearch.db") as store:
        samples.begin(store, samples.sample_study("other", folder=folder))
    result = invoke("front")
    assert result.exit_code == 2
    assert "name one of: sample, other" in result.stderr
    assert [row["study"] for row in json.loads(invoke("status", "--json").stdout)] == [
        "sample",
        "other",
    ]


def test_storage_option_and_variable(
    stored: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = invoke("front").stdout
    url = f"sqlite:///{folder / 'archsearch.db'}"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert invoke("front").exit_code == 4
    assert invoke("front", "--storage", url).stdout == here
    monkeypatch.setenv("ARCHSEARCH_STORAGE", url)
    assert invoke("front").stdout == here


def test_plot_writes_picture_or_page(stored: object, folder: Path) -> None:
    assert invoke("front", "--plot", "front.png").exit_code == 0
    assert invoke("front", "--plot", "front.html").exit_code == 0
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "front.html").read_text().startswith("<!doctype html>")


def test_status_counts_every_trial(stored: tuple[StudyRecord, list[TrialRecord]]) -> None:
    _, trials = stored
    (row,) = json.loads(invoke("status", "--json").stdout)
    for state in TrialState:
        assert row["trials"][state] == sum(trial.state is state for trial in trials)
    assert "ended: trials" in invoke("status").stdout


def test_show_tells_all_of_a_trial(stored: tuple[StudyRecord, list[TrialRecord]]) -> None:
    _, trials = stored
    trial = first(trials, TrialState.COMPLETE)
    values = json.loads(invoke("show", str(trial.number), "--json").stdout)
    assert values["metrics"] == trial.metrics
    assert values["evaluation"]["learning_rate"] == trial.evaluation.learning_rate
    text = invoke("show", str(trial.number)).stdout
    assert trial.arch.layers[1].mixer in text and "learning rate" in text and "pairs" in text
    failed = first(trials, TrialState.FAILED)
    assert failed.message in invoke("show", str(failed.number)).stdout
    over = first(trials, TrialState.INFEASIBLE)
    assert over.violations[0] in invoke("show", str(over.number)).stdout
    twice = first(trials, TrialState.DUPLICATE)
    assert f"trial {twice.duplicate_of}" in invoke("show", str(twice.number)).stdout


def test_export_refuses_what_it_cannot_do(
    stored: tuple[StudyRecord, list[TrialRecord]], folder: Path
) -> None:
    _, trials = stored
    failed = first(trials, TrialState.FAILED).number
    result = invoke("export", str(failed), "out")
    assert (result.exit_code, "no trained model" in result.stderr) == (2, True)
    complete = first(trials, TrialState.COMPLETE).number  # made up: its weights are nowhere
    result = invoke("export", str(complete), "out")
    assert (result.exit_code, "weights" in result.stderr) == (4, True)
    assert not (folder / "out").exists()
    (folder / "used").mkdir()
    (folder / "used" / "file").touch()
    result = invoke("export", str(complete), "used")
    assert (result.exit_code, "name a new one" in result.stderr) == (2, True)


def test_sync_publishes_and_ui_finds_it(stored: object, folder: Path) -> None:
    result = invoke("ui")  # nothing is published yet
    assert (result.exit_code, "archsearch sync sample" in result.stderr) == (4, True)
    assert not (folder / "mlflow.db").exists()
    result = invoke("sync")
    assert (result.exit_code, "shows 24 trials of 'sample'" in result.stdout) == (0, True)
    assert (folder / "mlflow.db").exists()
    with socket.socket() as taken:  # so that no server is started here
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = invoke("ui", "--port", str(taken.getsockname()[1]))
    assert (result.exit_code, "choose another with --port" in result.stderr) == (4, True)


def test_sync_to_nowhere_is_a_service_error(stored: object, folder: Path) -> None:
    result = invoke("sync", "--mlflow", "http://127.0.0.1:9")  # the port that discards
    assert result.exit_code == 4
    assert "MLflow at http://127.0.0.1:9 cannot be used" in result.stderr
    assert "Traceback" not in result.stderr


def test_mixers_lists_every_mixer_with_its_fields() -> None:
    values = json.loads(invoke("mixers", "--json").stdout)
    assert [row["name"] for row in values] == list(mixer_names())
    text = invoke("mixers").stdout
    for row in values:
        assert row["summary"] in text
        assert all(field["name"] in text for field in row["fields"])


def test_a_mixer_that_cannot_be_used_does_not_hide_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archsearch import registry

    (folder / "broken_mixer.py").write_text("raise RuntimeError('broken on purpose')")
    registry.add_plugin_file(folder / "broken_mixer.py")
    try:
        rows = {row["name"]: row for row in mixers_values()}
        assert "broken on purpose" in rows["broken_mixer"]["error"]
        assert "broken on purpose" in invoke("mixers").stdout
        assert "fields" in rows["attention"]
    finally:
        registry.forget_plugin_file("broken_mixer")


def test_schema_goes_to_output_or_file(folder: Path) -> None:
    assert json.loads(invoke("schema").stdout) == study_schema()
    assert invoke("schema", "--output", "study.schema.json").output == ""
    assert json.loads((folder / "study.schema.json").read_text()) == study_schema()
    result = invoke("schema", "--output", "absent/study.schema.json")
    assert (result.exit_code, "cannot be written" in result.stderr) == (2, True)


def test_check_passes_here_and_makes_nothing(folder: Path) -> None:
    result = invoke("check", "--json")
    checks = [Check(**row) for row in json.loads(result.stdout)]
    assert [check.name for check in checks if not check.ok] == []
    assert result.exit_code == 0
    names = " ".join(check.name for check in checks)
    for part in ("torch", "device cpu", "mixer attention", "kernel attention.sdpa", "database"):
        assert part in names
    assert list(folder.iterdir()) == []


def test_check_fails_if_anything_does(folder: Path) -> None:
    (folder / "archsearch.db").write_text("this is no database, and long enough to be looked at")
    result = invoke("check", "--mlflow", "http://127.0.0.1:9")
    assert result.exit_code == 4
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["database", "tracking"]
    assert "2 of" in result.stderr and "database, tracking" in result.stderr
    untracked = invoke("check", "--mlflow", "none")
    assert "tracking" not in untracked.stdout + untracked.stderr


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_dry_run_tells_what_a_study_costs_and_writes_nothing(folder: Path, path: Path) -> None:
    result = invoke("run", str(path), "--dry-run", "--trials", "7", "--time", "90s")
    assert result.exit_code == 0
    for part in ("ways to choose", "state ", "7 trials or 1m30s", "population", "mlflow"):
        assert part in result.stdout
    values = json.loads(invoke("run", str(path), "--dry-run", "--json").stdout)
    low, high = values["costs"]["state_bytes"]
    assert 0 < low <= high
    assert list(folder.iterdir()) == []


def test_dry_run_counts_what_limits_exclude(folder: Path) -> None:
    text = (STUDIES / "quickstart.yaml").read_text() + "limits: {state_bytes: 8KiB}\n"
    (folder / "study.yaml").write_text(text)
    space = json.loads(invoke("run", "study.yaml", "--dry-run", "--json").stdout)["space"]
    assert 0 < space["within_limits"] < space["looked_at"] == space["ways_to_choose"]


def test_dry_run_counts_architectures_and_not_only_ways_to_choose(folder: Path) -> None:
    layers = "[attention, &maybe {one_of: [none, {base_conv: {kernel: 3}}]}, *maybe]"
    text = f"study: twice\nmodel: {{layers: {layers}}}\ntask: {{mqar: tiny}}\n"
    (folder / "study.yaml").write_text(text)
    space = json.loads(invoke("run", "study.yaml", "--dry-run", "--json").stdout)["space"]
    assert (space["ways_to_choose"], space["architectures"]) == (4, 3)
    said = "4 ways to choose an architecture, 3 of them distinct"
    assert said in invoke("run", "study.yaml", "--dry-run").stdout


def test_bad_study_names_line_and_writes_nothing(folder: Path) -> None:
    (folder / "study.yaml").write_text("study: s\nmodle: {}\ntask: {mqar: tiny}\n")
    result = invoke("run", "study.yaml")
    assert result.exit_code == 2
    assert "study.yaml:2:1" in result.stderr and "'model'" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["study.yaml"]


def test_bad_time_is_refused(folder: Path) -> None:
    result = invoke("run", str(STUDIES / "quickstart.yaml"), "--time", "soon")
    assert (result.exit_code, "--time: 'soon'" in result.stderr) == (2, True)


def test_study_of_another_space_or_held_by_another_is_refused(
    stored: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (STUDIES / "quickstart.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("study: quickstart", "study: sample"))
    result = invoke("run", "study.yaml", "--mlflow", "none")
    assert (result.exit_code, "sample" in result.stderr) == (3, True)
    with Store("sqlite:///archsearch.db") as store:
        samples.begin(store, samples.sample_study("quickstart", folder=folder))
    result = invoke("run", str(STUDIES / "quickstart.yaml"), "--mlflow", "none")
    assert result.exit_code == 3
