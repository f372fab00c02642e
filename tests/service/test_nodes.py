"""A coordinator on a real Ray cluster of several nodes: sick, outdated, leaving, joining ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raylets import RAY, Raylets
from service_cases import TESTS, Driver, check_books, held, stored
from stub_trials import DEVICE_MODEL, MODEL, NAME, SICK, stub_study

from archsearch import __version__
from archsearch.errors import FailureClass
from archsearch.records import AttemptState, TrialState
from archsearch.store import Store

ARCHSEARCH = str(Path(sys.executable).parent / "archsearch")
STUDY = """
study: tiny
model: {width: 16, layers: [base_conv, {one_of: [linear_attention]}]}
task: {mqar: tiny}
train: {learning_rates: [1e-2], seeds: 1, epochs: 1}
search: {sampler: random, trials: 1}
tracking: {mlflow: none}
resources: {device: GOOD}
"""


@pytest.fixture(scope="module")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """Nodes that each have a device of their own name, so that a study can ask for one of them."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    outdated = tmp_path_factory.mktemp("outdated")
    (outdated / "sitecustomize.py").write_text("import archsearch\narchsearch.__version__ = '0.0'")
    with Raylets({"PYTHONPATH": path}) as cluster:
        nodes = [
            cluster.add(2, "GOOD"),
            cluster.add(2, "SICK", {SICK: "1"}),
            cluster.add(1, "OLD", {"PYTHONPATH": f"{outdated}{os.pathsep}{path}"}),
        ]
        for node in nodes:
            cluster.wait_for(node)
        yield cluster


def drive(raylets: Raylets, folder: Path, orders: dict[str, Any], **settings: Any) -> Driver:
    folder.mkdir(exist_ok=True)
    return Driver(folder, orders, raylets.environment, address=raylets.address, **settings)


def lines(driver: Driver) -> list[dict[str, Any]]:
    """All that a coordinator says until it ends."""
    out, _ = driver.process.communicate()
    return [json.loads(line) for line in out.splitlines()]


def notes(said: list[dict[str, Any]]) -> str:
    return "\n".join(line["note"] for line in said if line.get("note"))


def test_a_study_completes_beside_a_sick_and_an_outdated_node(
    raylets: Raylets, tmp_path: Path
) -> None:
    settings = {"resources": {"parallel": None}, "search": {"trials": 16}}
    said = lines(drive(raylets, tmp_path, {"jitter_s": 0.2}, **settings))
    assert said[-1]["reason"] == "trials", said[-1]
    slots = [line["slots"] for line in said if line.get("slots")]
    assert (slots[0], slots[-1]) == (5, 2)
    news = notes(said)
    assert "lost 3 trials in a row, the last: as ordered; it is left alone from now on" in news
    assert f"has archsearch 0.0 (Python {sys.version.split()[0]}, torch " in news
    assert f"and this coordinator has archsearch {__version__} (Python " in news
    spec = stub_study(tmp_path)
    assert {one.state for one in stored(spec)} == {TrialState.COMPLETE}
    for trial in stored(spec):
        states = [(one.state, one.failure) for one in trial.attempts]
        *lost, last = states
        assert last == (AttemptState.DONE, None)
        assert set(lost) <= {(AttemptState.FAILED, FailureClass.LOST)}
        ordered = [one for one in trial.attempts if one.message == "as ordered"]
        assert len(ordered) <= 1, "a lost trial goes to another node"
    check_books(spec)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("SICK", "lost 3 trials in a row, the last: as ordered"),
        ("OLD", f"has archsearch 0.0 .*, and this coordinator has archsearch {__version__} "),
    ],
)
def test_a_study_stops_when_no_node_is_left(
    raylets: Raylets, tmp_path: Path, device: str, reason: str
) -> None:
    said = lines(drive(raylets, tmp_path, {}, resources={"device": device}))
    assert re.search(rf"no machine is left for trials\. .*\(node \w+\) {reason}", said[-1]["error"])
    assert {one.failure for one in stored(stub_study(tmp_path))} <= {None, FailureClass.LOST}


def test_trials_of_a_node_that_dies_go_again_on_one_that_joins(
    raylets: Raylets, tmp_path: Path
) -> None:
    """Its death is that of the only node there is; another one joins while the study waits."""
    lone = raylets.add(1, "LONE")
    raylets.wait_for(lone)
    with held(tmp_path) as lock:
        driver = drive(raylets, tmp_path, {"hold": [1]}, resources={"device": "LONE"})
        driver.wait_until_held()
        raylets.kill_raylet(lone)
        driver.read_until(
            lambda said: "has left the cluster; trials at once now: 0" in said["note"]
        )
        lock.close()
        raylets.wait_for(raylets.add(2, "LONE"))
        said = lines(driver)
    assert said[-1]["reason"] == "trials", said[-1]
    assert "has joined the cluster; trials at once now: 2" in notes(said)
    spec = stub_study(tmp_path)
    assert {one.state for one in stored(spec)} == {TrialState.COMPLETE}
    *lost, last = stored(spec)[1].attempts
    assert {one.failure for one in lost} == {FailureClass.LOST}
    assert last.state is AttemptState.DONE
    check_books(spec)


def test_trials_spread_over_nodes_as_these_leave_and_join(raylets: Raylets, tmp_path: Path) -> None:
    """Of two nodes that each run a trial one dies, and its trial begins again on a third."""

    def start(name: str) -> "subprocess.Popen[str]":
        return raylets.add(1, "WIDE", {NAME: name})

    nodes = {name: start(name) for name in ("first", "second")}
    for node in nodes.values():
        raylets.wait_for(node)
    with held(tmp_path) as lock:
        driver = drive(raylets, tmp_path, {"hold": [0, 1]}, resources={"device": "WIDE"})
        assert {node for node, _pid in driver.where_held()} == {"first", "second"}
        raylets.kill_raylet(nodes["second"])
        driver.read_until(lambda said: "trials at once now: 1" in said["note"])
        raylets.wait_for(start("third"))
        assert {node for node, _pid in driver.where_held()} == {"first", "third"}
        lock.close()
        said = lines(driver)
    assert said[-1]["reason"] == "trials", said[-1]
    spec = stub_study(tmp_path)
    assert {one.state for one in stored(spec)} == {TrialState.COMPLETE}
    attempts = [one for trial in stored(spec) for one in trial.attempts]
    failed = [(one.node, one.failure) for one in attempts if one.state is AttemptState.FAILED]
    assert failed == [("second", FailureClass.LOST)]
    assert {one.node for one in attempts if one.state is AttemptState.DONE} == {"first", "third"}
    check_books(spec)


def test_a_timed_trial_is_alone_on_a_node_of_the_studys_device_model(
    raylets: Raylets, tmp_path: Path
) -> None:
    """Each node has room for three; another one has processors of another model."""
    for node in [raylets.add(3, "KIN", {NAME: name}) for name in ("first", "second")]:
        raylets.wait_for(node)
    orders, settings = {"timed": 1, "hold": [0, 1]}, {"device": "KIN", "parallel": None}
    with held(tmp_path) as lock:
        driver = drive(raylets, tmp_path, orders, resources=settings, search={"trials": 2})
        assert {node for node, _pid in driver.where_held()} == {"first", "second"}
        lock.close()
        said = lines(driver)
    assert said[-1]["reason"] == "trials", said[-1]
    assert max(line.get("slots", 0) for line in said) == 2
    raylets.wait_for(raylets.add(3, "KIN", {MODEL: "another model"}))
    said = lines(drive(raylets, tmp_path, orders, resources=settings, search={"trials": 8}))
    assert said[-1]["reason"] == "trials", said[-1]
    assert "has another device (another model) than the latencies of this study" in notes(said)
    profiles = [trial.profile for trial in stored(stub_study(tmp_path)) if trial.profile]
    assert {(one.device_model, one.exclusive) for one in profiles} == {(DEVICE_MODEL, True)}
    check_books(stub_study(tmp_path, orders=orders))


def test_what_fits_no_node_is_refused_with_the_nearest(raylets: Raylets, tmp_path: Path) -> None:
    asked = {"device": "NONE", "cpus": 64}
    error = lines(drive(raylets, tmp_path, {}, resources=asked))[-1]["error"]
    assert "asks for 64 CPUs of type NONE, and no machine here can ever give that" in error
    # The largest of the nodes that are there by now.
    assert re.search(r"the nearest has [23] CPUs and 0 GPUs; device types: GOOD, ", error)


@pytest.mark.parametrize("is_job", [False, True], ids=["on a node", "as a job"])
def test_the_documented_commands_run_a_study_on_a_cluster(
    raylets: Raylets, tmp_path: Path, is_job: bool
) -> None:
    """With nothing pretended but the name of the device."""
    (tmp_path / "tiny.yaml").write_text(STUDY)
    place = {"ARCHSEARCH_STORAGE": f"sqlite:///{tmp_path}/results.db"}
    command = [ARCHSEARCH, "run", "tiny.yaml", "--address", "auto"]
    if is_job:
        job = ["--working-dir", ".", "--runtime-env-json", json.dumps({"env_vars": place})]
        command = [RAY, "job", "submit", "--address", raylets.dashboard, *job, "--", *command]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=raylets.environment if is_job else {**raylets.environment, **place},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 1 trials are done" in done.stdout
    with Store(place["ARCHSEARCH_STORAGE"]) as store:
        assert [trial.state for trial in store.trials("tiny")] == [TrialState.COMPLETE]
