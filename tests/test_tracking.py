"""MLflow shows what the database holds, can be rebuilt from it, and may be away for a while."""

import json
import logging
import math
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from servers import MlflowServer
from tracking_cases import ENOUGH_S, Case, publish

from archsearch.errors import ServiceError
from archsearch.records import TrialState
from archsearch.report import hypervolume_history
from archsearch.store import Store
from archsearch.tables import front_values
from archsearch.tracking import Publisher, check_mlflow, summary_address, sync
from archsearch.tracking.encoding import encodings, parameters_of

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh MLflow database, made once: its migrations take seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def case(tmp_path: Path, empty_mlflow: Path) -> Iterator[Case]:
    shutil.copy(empty_mlflow, tmp_path / "mlflow.db")
    study = samples.sample_study(folder=tmp_path)
    with Store(study.spec.tracking.storage, create=True) as store:
        ledger = samples.begin(store, study)
        trials = samples.sample_trials(study, 16)
        yield Case(store, ledger, study, trials, study.spec.tracking.mlflow)


def filtered_front(runs: list[Run]) -> set[str]:
    """Keys of the non-dominated runs, by comparing every pair: recall up, bytes and time down."""
    points = {
        run.data.tags["archsearch.key"]: (
            -run.data.metrics["recall"],
            run.data.metrics["state_bytes"],
            run.data.metrics["decode_ms"],
        )
        for run in runs
        if run.data.tags.get("feasible") == "true"
    }

    def beats(left: tuple, right: tuple) -> bool:
        return left != right and all(a <= b for a, b in zip(left, right, strict=True))

    return {k for k, p in points.items() if not any(beats(q, p) for q in points.values())}


def test_every_finished_trial_has_one_terminated_run_with_its_numbers(case: Case) -> None:
    pending = samples.sample_trial(case.study, 16, case.trials[0].arch, TrialState.PENDING)
    samples.add(case.store, case.ledger, [*case.trials, pending])
    publish(case)
    runs = case.by_key()
    shown = [trial for trial in case.trials if trial.state is not TrialState.DUPLICATE]
    assert len(shown) < len(case.trials)
    assert set(runs) == {*(str(trial.number) for trial in shown), "summary"}
    status = {"complete": "FINISHED", "infeasible": "KILLED", "failed": "FAILED"}
    for trial in shown:
        run = runs[str(trial.number)]
        assert run.info.status == status[trial.state]
        assert run.data.tags["state"] == trial.state
        assert run.data.tags["arch_hash"] == trial.arch.arch_hash
        assert json.loads(case.artifact(str(trial.number), "architecture.json")) == json.loads(
            trial.arch.canonical_json
        )
        assert {key: run.data.metrics[key] for key in trial.metrics} == trial.metrics
    assert runs["summary"].info.status == "FINISHED"
    assert case.store.unpublished(case.study.name) == []


def test_failures_carry_their_class_message_and_traceback(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials[:6])
    publish(case)
    run = case.by_key()["5"]
    assert run.data.tags["failure"] == "diverged"
    assert case.trials[5].message in run.data.tags["mlflow.note.content"]
    assert case.artifact("5", "traceback.txt") == b"Traceback"


def test_learning_curves_are_stepped(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials[:1])
    publish(case)
    run = case.by_key()["0"]
    points = case.history(run, "selection_recall/lr 0.01")
    assert [point.step for point in points] == [50, 100, 150, 200]
    assert [point.step for point in case.history(run, "train_loss/lr 0.001")] == [50, 100, 150, 200]
    pairs = {point.step: point.value for point in case.history(run, "recall_by_pairs")}
    assert pairs == case.trials[0].evaluation.recall_by_pairs


def test_all_runs_have_the_same_columns(case: Case) -> None:
    """Parallel coordinates show only runs that have every chosen column."""
    samples.add(case.store, case.ledger, case.trials)
    publish(case)
    runs = [run for key, run in case.by_key().items() if key != "summary"]
    assert len({frozenset(run.data.params) for run in runs}) == 1
    encoded = [{key for key in run.data.metrics if key.startswith("arch/")} for run in runs]
    assert len({frozenset(keys) for keys in encoded}) == 1
    assert all("layer1.window" in run.data.params for run in runs)
    assert {run.data.params["layer1.mixer"] for run in runs} > {"attention", "sliding_window"}


def test_inactive_fields_hold_a_sentinel(case: Case) -> None:
    window = next(t for t in case.trials if t.arch.layers[1].mixer == "sliding_window")
    other = next(t for t in case.trials if t.arch.layers[1].mixer == "gated_delta")
    spec = case.study.spec
    size = window.arch.layers[1].fields["window"]
    assert parameters_of(spec, window.arch)["layer1.window"] == str(size)
    assert parameters_of(spec, other.arch)["layer1.window"] == "0"
    assert encodings(spec, window.arch)["arch/sliding_window.window"] == size
    assert encodings(spec, other.arch)["arch/sliding_window.window"] == 0
    assert encodings(spec, other.arch)["arch/count/gated_delta"] == 1
    assert encodings(spec, other.arch)["arch/depth"] == 2


def test_front_tags_are_the_non_dominated_runs_and_follow_new_trials(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials[:8])
    publisher = Publisher(case.study.spec.tracking.storage, case.study.name, case.uri)
    publisher.start()
    assert publisher.flush(ENOUGH_S)
    fronts = []
    for more in (case.trials[8:], []):
        runs = case.runs()
        tagged = {
            run.data.tags["archsearch.key"] for run in runs if run.data.tags.get("front") == "true"
        }
        assert tagged == filtered_front(runs)
        assert {r.data.tags["front_rank"] for r in runs if r.data.tags.get("front") == "true"} == {
            "0"
        }
        fronts.append(tagged)
        samples.add(case.store, case.ledger, more)
        publisher.notify()
        assert publisher.flush(ENOUGH_S)
    publisher.stop(ENOUGH_S)
    # The later trials beat an earlier member; else this test would not see a tag taken back.
    assert fronts[0] - fronts[1]


def test_summary_carries_report_picture_front_and_hypervolume(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials)
    publish(case)
    study, trials = case.store.study(case.study.name), case.store.trials(case.study.name)
    assert json.loads(case.artifact("summary", "front.json")) == front_values(study, trials)
    assert case.artifact("summary", "front.png").startswith(b"\x89PNG")
    assert b'id="values"' in case.artifact("summary", "report.html")
    points = case.history(case.by_key()["summary"], "hypervolume")
    assert [(p.step, p.value) for p in points] == hypervolume_history(study, trials)
    path = summary_address(case.uri, case.study.name)
    assert path is not None and case.by_key()["summary"].info.run_id in path


def test_sync_twice_changes_nothing(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials)
    publish(case)
    published = case.picture()
    for _ in range(2):
        assert sync(case.store, case.study.name, case.uri) == len(case.trials)
        assert case.picture() == published


def test_sync_rebuilds_what_was_lost_and_mends_what_was_changed(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials)
    publish(case)
    before = sorted(map(repr, (case.by_key()[k].data.to_dictionary() for k in case.by_key())))
    runs, client = case.by_key(), case.client
    experiment = runs["0"].info.experiment_id
    client.delete_run(runs["0"].info.run_id)
    client.set_tag(runs["1"].info.run_id, "front", "perhaps")
    client.update_run(runs["2"].info.run_id, status="RUNNING")
    client.create_run(experiment, tags={"archsearch.key": "sample/4"})  # made twice, RUNNING
    client.create_run(experiment, tags={"archsearch.key": "sample/99"})  # no such trial
    stranger = client.create_run(experiment, run_name="somebody else's")
    client.delete_experiment(experiment)
    sync(case.store, case.study.name, case.uri)
    assert client.get_run(stranger.info.run_id).info.lifecycle_stage == "active"
    client.delete_run(stranger.info.run_id)
    after = sorted(map(repr, (case.by_key()[k].data.to_dictionary() for k in case.by_key())))
    assert after == before
    assert {run.info.status for run in case.runs()} == {"FINISHED", "FAILED", "KILLED"}


def test_a_run_left_running_by_a_killed_process_is_ended_by_the_next(case: Case) -> None:
    experiment = case.client.create_experiment(case.study.name)
    case.client.create_run(experiment, tags={"archsearch.key": f"{case.study.name}/0"})
    samples.add(case.store, case.ledger, case.trials[:1])
    publish(case)
    assert case.by_key()["0"].info.status == "FINISHED"
    assert case.by_key()["0"].data.metrics["recall"] == case.trials[0].metrics["recall"]


def test_run_written_by_another_version_is_replaced(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials[:1])
    experiment = case.client.create_experiment(case.study.name)
    old = case.client.create_run(experiment, tags={"archsearch.key": f"{case.study.name}/0"})
    case.client.log_param(old.info.run_id, "depth", "17")
    publish(case)
    assert case.by_key()["0"].data.params["depth"] == "2"


def test_numbers_that_are_not_finite_never_reach_mlflow(case: Case) -> None:
    trial = case.trials[0]
    odd = {"prefill_ms": math.inf, "decode_ms": 0.5, "recall": trial.metrics["recall"]}
    samples.add(case.store, case.ledger, [replace(trial, metrics={**odd, "state_bytes": 1.0})])
    publish(case)
    metrics = case.by_key()["0"].data.metrics
    assert "prefill_ms" not in metrics
    assert all(abs(value) < 1e300 for value in metrics.values())


def test_long_values_are_cut_in_columns_and_whole_in_the_artifact(case: Case) -> None:
    long = "x" * 9000
    trial = samples.with_mixer(case.trials[0], "gone", {"table": long})
    samples.add(case.store, case.ledger, [replace(trial, message="y" * 9000)])
    publish(case)
    run = case.by_key()["0"]
    assert run.data.params["layer1.table"] == long[:6000]
    assert json.loads(case.artifact("0", "architecture.json"))["layers"][1]["fields"] == {
        "table": long
    }


def test_mlflow_that_cannot_be_reached_is_said_once_and_delays_nothing(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        samples.add(case.store, case.ledger, case.trials)
        publisher = Publisher(case.study.spec.tracking.storage, case.study.name, uri)
        began = time.monotonic()
        publisher.start()
        publisher.notify()
        assert time.monotonic() - began < 1  # only announces
        assert not publisher.flush(0.5)
        publisher.stop(ENOUGH_S)
        assert time.monotonic() - began < 30  # bounded: no retries, no long timeouts
        with pytest.raises(ServiceError, match="cannot be used"):
            check_mlflow(uri)
        with pytest.raises(ServiceError, match=f"MLflow at {uri} cannot be used"):
            sync(case.store, case.study.name, uri)
    said = [record.getMessage() for record in caplog.records if "archsearch" in record.name]
    assert len(said) == 2
    assert f"MLflow at {uri} cannot be used" in said[0] and "\n" not in said[0]
    assert "archsearch sync sample" in said[1]
    assert len(case.store.unpublished(case.study.name)) == len(case.trials)


def test_server_that_refuses_then_goes_then_comes_back_gets_everything(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    samples.add(case.store, case.ledger, case.trials[:8])
    database = ("--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with MlflowServer(tmp_path, "server", *database, "--allowed-hosts", "other.example") as server:
        with pytest.raises(ServiceError, match="--allowed-hosts"):
            check_mlflow(server.url)
        publisher = Publisher(case.study.spec.tracking.storage, case.study.name, server.url)
        publisher.start()
        assert not publisher.flush(3)
        server.stop()
        samples.add(case.store, case.ledger, case.trials[8:])
        publisher.notify()
        assert not publisher.flush(0.5)
        server.start(*database)
        assert publisher.flush(ENOUGH_S)
        publisher.stop(ENOUGH_S)
        assert "answers" in check_mlflow(server.url)
        through_server = replace(case, uri=server.url)
        runs = through_server.by_key()
        shown = [trial for trial in case.trials if trial.state is not TrialState.DUPLICATE]
        assert len(runs) == len(shown) + 1
        assert "RUNNING" not in {run.info.status for run in runs.values()}
        tagged = {
            r.data.tags["archsearch.key"]
            for r in runs.values()
            if r.data.tags.get("front") == "true"
        }
        assert tagged == filtered_front(list(runs.values()))
        files = through_server.client.list_artifacts(runs["summary"].info.run_id)
        assert {file.path for file in files} == {"report.html", "front.png", "front.json"}
    assert case.store.unpublished(case.study.name) == []
    said = [record.getMessage() for record in caplog.records if "archsearch" in record.name]
    assert ["--allowed-hosts" in said[0], "answers again" in said[1], len(said)] == [True, True, 2]


def test_checking_makes_no_database(tmp_path: Path) -> None:
    assert "does not exist yet" in check_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert list(tmp_path.iterdir()) == []


def test_deleted_runs_stay_deleted_in_the_list(case: Case) -> None:
    samples.add(case.store, case.ledger, case.trials[:2])
    publish(case)
    run = case.by_key()["0"]
    case.client.delete_run(run.info.run_id)
    publish(case)
    deleted = case.client.search_runs([run.info.experiment_id], run_view_type=ViewType.DELETED_ONLY)
    assert [old.info.run_id for old in deleted] == [run.info.run_id]
    assert case.by_key()["0"].info.run_id != run.info.run_id
