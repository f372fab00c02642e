"""`archsearch run` and what follows it, with nothing pretended: Ray, training, database, MLflow."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from one_off import SOURCE
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.registry import forget_plugin_file, mixer_names

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

ARCHSEARCH = Path(sys.executable).parent / "archsearch"
STUDY = """
study: tiny
model:
  width: 16
  layers:
    - base_conv
    - one_of:
        - attention: {heads: 1, kv_heads: 0}
        - sliding_window: {window: [4, 8], heads: 1}
task: {mqar: tiny}
train: {learning_rates: [1e-2], seeds: 1, epochs: 1}
search: {sampler: random, trials: 3}
resources: {parallel: 1}
"""
FAILING = '''"""A mixer that cannot be built."""
from dataclasses import dataclass
from archsearch.mixer import Mixer

class Failing(Mixer):
    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        def state_spec(self, context_len, dtype):
            return ()
        def flops(self, context_len):
            return 1

    def __init__(self, config):
        raise RuntimeError("cannot be built, on purpose")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(STUDY)
    before = set(mixer_names())
    yield tmp_path
    for name in set(mixer_names()) - before:
        forget_plugin_file(name)


def front_of_mlflow(folder: Path) -> set[int]:
    """Non-dominated complete runs, by comparing every pair of MLflow's runs."""
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny").experiment_id
    points = {
        int(run.data.tags["archsearch.key"].split("/")[1]): (
            -run.data.metrics["recall"],
            run.data.metrics["state_bytes"],
        )
        for run in client.search_runs([experiment], "tags.feasible = 'true'")
    }

    def beats(left: tuple, right: tuple) -> bool:
        return left != right and all(a <= b for a, b in zip(left, right, strict=True))

    return {k for k, p in points.items() if not any(beats(q, p) for q in points.values())}


def invoke(*arguments: str) -> str:
    """Run a command here; return what it prints."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_interrupted_run_goes_on_and_everything_agrees(folder: Path, ray_here: None) -> None:
    """Ctrl-C, run again, then front, MLflow, export and the exported script."""
    command = [ARCHSEARCH, "run", "tiny.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        for line in process.stdout:
            if line.startswith("1/3 trials"):
                process.send_signal(signal.SIGINT)
                break
        rest, noise = process.communicate()
    assert process.returncode == 130
    assert "run the same command again" in rest
    assert noise == ""
    said = invoke("run", "tiny.yaml")
    assert "all 3 trials are done" in said and "archsearch ui tiny" in said
    members = {row["number"] for row in json.loads(invoke("front", "--json"))["front"]}
    assert members == front_of_mlflow(folder)
    invoke("export", str(max(members)), "home")
    result = CliRunner().invoke(app, ["export", str(max(members)), "tiny.yaml/home"])
    assert (result.exit_code, "cannot be written" in result.stderr) == (2, True)
    script = [sys.executable, folder / "home" / "generate.py"]
    done = subprocess.run(script, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    generated = next(line for line in done.stdout.splitlines() if line.startswith("generated"))
    assert len(generated.split()[1:]) == 8


def test_study_without_a_complete_trial_ends_with_5(folder: Path, ray_here: None) -> None:
    (folder / "cannot_build.py").write_text(FAILING)
    study = STUDY.replace("model:", "plugins: [./cannot_build.py]\nmodel:")
    layers = study[study.index("    - base_conv") : study.index("task:")]
    study = study.replace(layers, "    - cannot_build\n").replace("trials: 3", "trials: 1")
    (folder / "failing.yaml").write_text(study)
    result = CliRunner().invoke(app, ["run", "failing.yaml", "--mlflow", "none"])
    assert result.exit_code == 5, result.output
    assert "cannot be built, on purpose" in result.output
    shown = CliRunner().invoke(app, ["show", "0"])
    assert "plugin_error" in shown.output
    assert not (folder / "mlflow.db").exists()


def test_resume_needs_neither_the_file_nor_its_plugins(folder: Path, ray_here: None) -> None:
    """Also with another budget, and with the mixer that the database alone still has."""
    elsewhere = folder / "files"
    elsewhere.mkdir()
    (elsewhere / "resumed_mixer.py").write_text(SOURCE)
    study = STUDY.replace("model:", "plugins: [./resumed_mixer.py]\nmodel:")
    study = study.replace("    - base_conv\n", "    - resumed_mixer: {scale: [1, 2]}\n")
    (elsewhere / "tiny.yaml").write_text(study)
    assert "all 1 trials are done" in invoke(
        "run", "files/tiny.yaml", "--trials", "1", "--mlflow", "none"
    )
    forget_plugin_file("resumed_mixer")
    shutil.rmtree(elsewhere)
    url = f"sqlite:///{folder}/archsearch.db"
    assert "all 1 trials are done" in invoke("resume", "tiny", "--storage", url)
    invoke("budget", "tiny", "--trials", "2", "--time", "1h")
    assert "all 2 trials are done" in invoke("resume")
    values = json.loads(invoke("budget", "--json"))
    assert (values["trials"], values["time_s"]["limit"]) == ({"limit": 2, "spent": 2}, 3600.0)
    assert values["device_time_s"]["spent"] > 0
    assert not (folder / "mlflow.db").exists()


def test_run_into_head_is_quiet_and_stops_cleanly(folder: Path) -> None:
    command = f"{ARCHSEARCH} run tiny.yaml --mlflow none --trials 4 | head -n 2"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (141, "")
    (row,) = json.loads(invoke("status", "--json"))
    assert (row["coordinator"], row["stop_reason"]) == (None, "interrupted")


def test_run_as_json_prints_json_alone(folder: Path, ray_here: None) -> None:
    arguments = ["run", "tiny.yaml", "--json", "--trials", "1", "--mlflow", "none"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["study"] == "tiny"
    assert "1/1 trials" in result.stderr
