"""MLflow is rebuilt from the database: after it has lost everything, and after a retry."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from mlflow import MlflowClient
from servers import MlflowServer
from tracking_cases import Case, publish

from archsearch.records import TrialState
from archsearch.store import Store, control
from archsearch.store.claim import claim
from archsearch.store.ledger import Verdict
from archsearch.tracking import sync

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    study = samples.sample_study(folder=tmp_path)
    with Store(study.spec.tracking.storage, create=True) as store:
        ledger = samples.begin(store, study)
        trials = samples.sample_trials(study, 16)
        yield Case(store, ledger, study, trials, study.spec.tracking.mlflow)


def test_sync_rebuilds_everything_on_a_server_that_lost_everything(
    case: Case, tmp_path: Path
) -> None:
    """A new and empty server, a deleted experiment, a run that was only begun: nothing twice."""

    def picture(there: Case) -> dict[str, object]:
        """As `Case.picture` by trial, with the names and contents of artifacts."""
        by_id = there.picture()
        return {
            key: (by_id[run.info.run_id], contents(there.client, run.info.run_id))
            for key, run in there.by_key().items()
        }

    def contents(client: MlflowClient, run_id: str) -> dict[str, bytes]:
        names = [file.path for file in client.list_artifacts(run_id)]
        return {name: Path(client.download_artifacts(run_id, name)).read_bytes() for name in names}

    def sync_once(there: Case) -> dict[str, object]:
        assert sync(there.store, there.study.name, there.uri) == len(case.trials)
        return picture(there)

    samples.add(case.store, case.ledger, case.trials)
    shown = len([one for one in case.trials if one.state is not TrialState.DUPLICATE])
    database = ("--backend-store-uri", "sqlite:///server.db")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with MlflowServer(tmp_path / "one", "server", *database) as server:
        there = replace(case, uri=server.url)
        before = sync_once(there)
        assert len(before) == shown + 1
        client, run_of = there.client, there.by_key()
        experiment = run_of["0"].info.experiment_id
        for key in ("0", "summary"):
            client.delete_run(run_of[key].info.run_id)
        client.create_run(experiment, tags={"archsearch.key": f"{case.study.name}/0"})
        client.delete_experiment(experiment)
        assert forgetful(sync_once(there)) == forgetful(before)
        assert forgetful(sync_once(there)) == forgetful(before)
    with MlflowServer(tmp_path / "two", "server", *database) as server:
        assert forgetful(sync_once(replace(case, uri=server.url))) == forgetful(before)


def forgetful(picture: dict[str, object]) -> str:
    """The picture without what must differ: numbers of experiments and runs."""
    return re.sub(r"[0-9a-f]{32}", "RUN", repr(sorted(picture.items())))


def test_a_retried_trial_has_one_run_that_shows_how_it_ended_last(case: Case) -> None:
    failed = next(one for one in case.trials if one.state is TrialState.FAILED)
    samples.add(case.store, case.ledger, case.trials[: failed.number + 1])
    publish(case)
    assert case.by_key()[str(failed.number)].info.status == "FAILED"
    case.ledger.release("trials", 1.0)
    assert control.retry(case.store, case.study.name, None, [failed.number]) == [failed.number]
    ledger = claim(case.store, case.study.spec, (), {})
    metrics = case.trials[0].metrics
    ledger.finish(failed.number, Verdict(TrialState.COMPLETE, metrics=metrics))
    publish(case)
    run = case.by_key()[str(failed.number)]
    assert (run.info.status, run.data.tags["failure"]) == ("FINISHED", "none")
    files = {file.path for file in case.client.list_artifacts(run.info.run_id)}
    assert "traceback.txt" not in files
