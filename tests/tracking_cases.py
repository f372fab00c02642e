"""A stored study with MLflow beside it, as the tests of tracking look at it."""

from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from archsearch.records import StudyRecord, TrialRecord
from archsearch.store import Store
from archsearch.store.ledger import Ledger
from archsearch.tracking import Publisher

ENOUGH_S = 60.0
"""Longest wait for something that takes a second on a quiet machine."""


@dataclass
class Case:
    """A stored study, and MLflow beside it."""

    store: Store
    ledger: Ledger
    study: StudyRecord
    trials: list[TrialRecord]
    uri: str

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri)

    def runs(self) -> list[Run]:
        experiment = self.client.get_experiment_by_name(self.study.name)
        return list(self.client.search_runs([experiment.experiment_id]))

    def by_key(self) -> dict[str, Run]:
        runs = {run.data.tags["archsearch.key"].split("/")[1]: run for run in self.runs()}
        assert len(runs) == len(self.runs())
        return runs

    def artifact(self, key: str, name: str) -> bytes:
        uri = self.by_key()[key].info.artifact_uri
        return Path(uri.removeprefix("file://"), name).read_bytes()

    def picture(self) -> dict[str, object]:
        """Everything of every run that a person could see, by run id."""
        return {
            run.info.run_id: (
                run.info.status,
                run.info.start_time,
                run.info.end_time,
                run.data.params,
                run.data.tags,
                {
                    key: [(p.step, p.timestamp, p.value) for p in self.history(run, key)]
                    for key in sorted(run.data.metrics)
                },
            )
            for run in self.runs()
        }

    def history(self, run: Run, key: str) -> list:
        return self.client.get_metric_history(run.info.run_id, key)


def publish(case: Case) -> None:
    publisher = Publisher(case.study.spec.tracking.storage, case.study.name, case.uri)
    publisher.start()
    assert publisher.flush(ENOUGH_S)
    publisher.stop(ENOUGH_S)
