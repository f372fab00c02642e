"""One study in MLflow: a flat run for each trial with an end of its own, and one with the report.

The only module that imports mlflow. A duplicate has no run: its result is an earlier trial's, and
two runs of one architecture would look like two trainings. A run is created for a trial that has
ended and terminated at once, before its data is logged, so that hardly a moment exists in which a
killed process could leave one RUNNING; what is left so is put right when the study is opened again.
Everything here is idempotent. Knows nothing of threads, outages or the database.
"""

import fcntl
import glob
import json
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag, ViewType

from archsearch.display import brief
from archsearch.front import confirmed, ranked
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.report import html_report, hypervolume_history, png_report
from archsearch.report.values import by_finish
from archsearch.tables import front_text, front_values
from archsearch.tracking.encoding import (
    parameters_of,
    points_of,
    rank_tags,
    study_note,
    tags_of,
    trial_note,
)

KEY = "archsearch.key"
"""Tag that says what a run shows, `study/number` or `study/summary`; one run a key."""
SUMMARY = "summary"
NOTE = "mlflow.note.content"
LONGEST_PARAM = 6000
LONGEST_TAG = 5000

_STATUS = {
    TrialState.COMPLETE: "FINISHED",
    TrialState.INFEASIBLE: "KILLED",
    TrialState.STOPPED: "KILLED",
    TrialState.FAILED: "FAILED",
}
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a server's runs would each be announced
}


def connect(uri: str) -> MlflowClient:
    """A client that fails within seconds; trying again is the publisher's business.

    MLflow takes these settings from the environment alone; what the user set there stays.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    database = sqlite_file(uri)
    if database is not None:
        _sweep(database)
    if database is not None and database.exists():
        # MLflow would try for minutes, with warnings, what SQLite can say at once.
        sqlite3.connect(database).close()
    elif database is not None:
        _make(database)
    return MlflowClient(tracking_uri=uri)


def _make(database: Path) -> None:
    """Make an SQLite database of MLflow as a whole or not at all.

    MLflow takes seconds to make one. What a kill leaves of it, or two processes that make the same
    one, can never be opened again.
    """
    with _folder_beside(database) as folder:
        whole = Path(folder, database.name)
        # Relative: what a folder's name has of % and the like is then no part of the URI.
        MlflowClient(tracking_uri=f"sqlite:///{os.path.relpath(whole)}").search_experiments(1)
        try:
            os.link(whole, database)
        except FileExistsError:
            return  # somebody else was quicker
        except OSError:  # no hard links on this disk
            whole.rename(database)


@contextmanager
def _folder_beside(database: Path) -> Iterator[Path]:
    """A hidden folder on the same disk, locked meanwhile; a killed process leaves it unlocked."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(database), dir=database.parent))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _prefix(database: Path) -> str:
    return f".{database.name}-"


def _sweep(database: Path) -> None:
    """Remove what processes left that were killed while they made this database."""
    for folder in database.parent.glob(f"{glob.escape(_prefix(database))}????????"):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # somebody is making it
        finally:
            os.close(handle)


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


@dataclass
class _Shown:
    """What MLflow has of one run."""

    run_id: str
    params: dict[str, str]
    tags: dict[str, str]


class View:
    """One study in MLflow, as it is now and as it should be. Any call may raise anything."""

    def __init__(self, client: MlflowClient, uri: str, study: StudyRecord) -> None:
        self._client = client
        self._study = study
        self.experiment_id = _experiment(client, uri, study)
        self._runs: dict[str, _Shown] = {}
        self._volumes_logged = 0
        self._read_runs()

    def _read_runs(self) -> None:
        token = None
        while True:
            page = self._client.search_runs(
                [self.experiment_id],
                run_view_type=ViewType.ACTIVE_ONLY,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            for run in page:
                self._remember(run)
            token = page.token
            if not token:
                return

    def _remember(self, run: Run) -> None:
        key = run.data.tags.get(KEY)
        if key is None:
            return  # somebody else's run
        if key in self._runs:
            # Created twice: an answer of the server was lost on its way.
            self._client.delete_run(run.info.run_id)
            return
        self._runs[key] = _Shown(run.info.run_id, dict(run.data.params), dict(run.data.tags))
        if run.info.status == "RUNNING":
            self._client.set_terminated(run.info.run_id, "KILLED")

    def key(self, trial: TrialRecord) -> str:
        return f"{self._study.name}/{trial.number}"

    @property
    def summary_key(self) -> str:
        return f"{self._study.name}/{SUMMARY}"

    def lacks(self, trial: TrialRecord) -> bool:
        """True if this trial should have a run and has none."""
        return trial.state in _STATUS and self.key(trial) not in self._runs

    def _run(self, key: str, name: str, start: datetime, end: datetime, status: str) -> _Shown:
        """The run of this key, made if need be; never left RUNNING."""
        shown = self._runs.get(key)
        if shown is None:
            run = self._client.create_run(
                self.experiment_id,
                start_time=_milliseconds(start),
                tags={KEY: key, "mlflow.source.name": "archsearch"},
                run_name=name,
            )
            shown = self._runs[key] = _Shown(run.info.run_id, {}, dict(run.data.tags))
        elif shown.tags.get("mlflow.runName") != name:
            self._client.update_run(shown.run_id, name=name)
        self._client.set_terminated(shown.run_id, status, _milliseconds(end))
        return shown

    def _tag(self, shown: _Shown, wanted: dict[str, str]) -> list[RunTag]:
        """Tags that MLflow does not have like this yet."""
        cut = {key: value[:LONGEST_TAG] for key, value in wanted.items()}
        changed = {key: value for key, value in cut.items() if shown.tags.get(key) != value}
        shown.tags.update(changed)
        return [RunTag(key, value) for key, value in changed.items()]

    def publish(self, trial: TrialRecord) -> None:
        """Show one final trial: everything but its rank, which only the whole study gives."""
        if trial.state not in _STATUS:
            return
        spec, key = self._study.spec, self.key(trial)
        params = {
            name: value[:LONGEST_PARAM] for name, value in parameters_of(spec, trial.arch).items()
        }
        shown = self._runs.get(key)
        if shown is not None and self._is_other(shown, trial, params):
            self._client.delete_run(self._runs.pop(key).run_id)
        end = trial.finished_at or trial.proposed_at
        name = f"{trial.number}: {brief(spec, trial.arch)}"[:200]
        shown = self._run(key, name, trial.proposed_at, end, _STATUS[trial.state])
        moment = _milliseconds(end)
        ranks = rank_tags(None) | {k: v for k, v in shown.tags.items() if k in rank_tags(None)}
        tags = {**tags_of(trial), **ranks, NOTE: trial_note(spec, trial)}
        self._client.log_batch(
            shown.run_id,
            metrics=[Metric(p.key, p.value, moment, p.step) for p in points_of(spec, trial)],
            params=[Param(name, value) for name, value in params.items()],
            tags=self._tag(shown, tags),
        )
        self._upload(shown, _trial_files(trial))

    def _is_other(self, shown: _Shown, trial: TrialRecord, params: dict[str, str]) -> bool:
        """True if a run cannot be brought up to date: parameters and artifacts are write-once.

        Another version of archsearch wrote it, or the trial was retried and ended otherwise.
        """
        ended = shown.tags.get("state", str(trial.state))
        changed = any(params.get(name, value) != value for name, value in shown.params.items())
        return changed or ended != str(trial.state)

    def _upload(self, shown: _Shown, files: Mapping[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="archsearch-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            self._client.log_artifacts(shown.run_id, folder)

    def refresh_ranks(self, trials: Sequence[TrialRecord]) -> None:
        """Bring the front's tags up to date in every run that has others."""
        ranks = {trial.number: rank for trial, rank in ranked(self._study, trials)}
        sure = {trial.number for trial in confirmed(self._study, trials)}
        for trial in trials:
            shown = self._runs.get(self.key(trial))
            if shown is not None:
                tags = self._tag(shown, rank_tags(ranks.get(trial.number), trial.number in sure))
                if tags:
                    self._client.log_batch(shown.run_id, tags=tags)

    def refresh_summary(self, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
        """Write the summary run anew: report, picture, front, hypervolume so far."""
        ends = [trial.finished_at for trial in trials if trial.finished_at is not None]
        end = max(ends, default=study.created_at)
        shown = self._run(self.summary_key, SUMMARY, study.created_at, end, "FINISHED")
        front = front_values(study, trials)
        note = f"{study_note(study)}\n\n```\n{front_text(study, trials)}\n```"
        tags = {"state": SUMMARY, "identity": study.spec.identity, NOTE: note}
        self._client.log_batch(
            shown.run_id,
            metrics=[
                *self._new_volumes(study, trials),
                Metric("front_size", float(len(front["front"])), _milliseconds(end), 0),
            ],
            tags=self._tag(shown, tags),
        )
        files = {
            "front.json": json.dumps(front, indent=2).encode(),
            "report.html": html_report(study, trials).encode(),
            "front.png": png_report(study, trials),
        }
        self._upload(shown, files)

    def _new_volumes(self, study: StudyRecord, trials: Sequence[TrialRecord]) -> list[Metric]:
        """Hypervolume after each complete trial that is not logged yet; the trial gives the time,
        so that logging it again changes nothing."""
        history = hypervolume_history(study, trials)
        points = [
            Metric(
                "hypervolume", volume, _milliseconds(trial.finished_at or trial.proposed_at), step
            )
            for (step, volume), trial in zip(history, by_finish(trials), strict=True)
        ]
        new, self._volumes_logged = points[self._volumes_logged :], len(points)
        return new

    def remove_unknown(self, trials: Sequence[TrialRecord]) -> None:
        """Delete runs of ours that no trial of the database stands behind."""
        known = {self.key(trial) for trial in trials if trial.state in _STATUS} | {self.summary_key}
        for key in [key for key in self._runs if key not in known]:
            self._client.delete_run(self._runs.pop(key).run_id)


def _experiment(client: MlflowClient, uri: str, study: StudyRecord) -> str:
    """Id of the study's experiment; made if need be, brought back if somebody deleted it."""
    found = client.get_experiment_by_name(study.name)
    if found is None:
        tags = {NOTE: study_note(study), "mlflow.experimentKind": "custom_model_development"}
        created: str = client.create_experiment(study.name, _artifact_folder(uri), tags)
        return created
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    known: str = found.experiment_id
    return known


def _artifact_folder(uri: str) -> str | None:
    """Beside a SQLite file, its artifacts; elsewhere the server decides."""
    database = sqlite_file(uri)
    return (database.parent / "mlruns").as_uri() if database is not None else None


def sqlite_file(uri: str) -> Path | None:
    """The file behind a `sqlite:///` URI, absolute; None for any other URI."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).resolve() if uri.startswith(prefix) else None


def _trial_files(trial: TrialRecord) -> dict[str, bytes]:
    """Long things, which parameters and tags are too short for."""
    files = {"architecture.json": trial.arch.model_dump_json(indent=2)}
    if trial.evaluation is not None and trial.state is TrialState.COMPLETE:
        files["evaluation.json"] = trial.evaluation.model_dump_json(indent=2)
    if trial.profile is not None and trial.state is TrialState.COMPLETE:
        files["profile.json"] = trial.profile.model_dump_json(indent=2)
    if trial.traceback:
        files["traceback.txt"] = trial.traceback
    return {name: text.encode() for name, text in files.items()}


_LOOK = "workflowType=machine_learning"
"""Asks MLflow's pages for the menu of model training rather than that of language agents."""


def summary_path(client: MlflowClient, study: str) -> str | None:
    """Where the user interface shows the study's summary, after the server's address."""
    experiment = client.get_experiment_by_name(study)
    if experiment is None:
        return None
    page = f"/#/experiments/{experiment.experiment_id}"
    for run in client.search_runs([experiment.experiment_id], f"tags.state = '{SUMMARY}'"):
        return f"{page}/runs/{run.info.run_id}/artifacts/report.html?{_LOOK}"
    return f"{page}/runs?{_LOOK}"
