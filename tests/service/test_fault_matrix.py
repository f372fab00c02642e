"""The fault matrix: whatever breaks, each trial is accounted for once after the next run."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import faults_of_answers
import faults_of_coordinators
import faults_of_services
import faults_of_workers
import pytest
from fault_cases import Site, check_accounts, proposals, trained_so_far
from fault_driver import TEMPLATES, drive
from faults_of_answers import POISONS
from service_cases import stored
from stub_trials import changed, stub_study

from archsearch.errors import FailureClass

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="session")
def address(ray_here: None) -> str:
    """Of the Ray that all cases share which do not kill it."""
    import ray  # reads its settings now

    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture(scope="session")
def templates(ray_here: None) -> Iterator[Path]:
    """Databases with one study in them, ours and MLflow's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = changed(stub_study(folder), "tracking", mlflow=f"sqlite:///{folder}/mlflow.db")
        drive(changed(spec, "search", trials=1))
        os.environ[TEMPLATES] = name
        yield folder


@pytest.fixture(params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path: Path, templates: Path) -> Site:
    storage = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    return Site(tmp_path, request.node.name, storage, templates)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, templates: Path) -> list[str]:
    """What a study proposes to which nothing happens."""
    alone = Site(tmp_path_factory.mktemp("alone"), "alone", None, templates)
    alone.rerun()
    return proposals(alone.spec)


@pytest.mark.parametrize("name", faults_of_coordinators.CASES)
def test_coordinator(name: str, site: Site, undisturbed: list[str]) -> None:
    coordinator_case(name, site)
    assert proposals(site.spec) == undisturbed


def coordinator_case(name: str, site: Site) -> None:
    faults_of_coordinators.CASES[name](site)
    before = trained_so_far(site)
    site.rerun()
    check_accounts(site)
    assert before.items() <= trained_so_far(site).items(), "what is stored is trained again"


@pytest.mark.parametrize("name", faults_of_workers.CASES)
def test_worker(name: str, tmp_path: Path, templates: Path, address: str) -> None:
    site = Site(tmp_path, "workers", None, templates)
    faults_of_workers.CASES[name](site, address)
    site.rerun()
    check_accounts(site)


@pytest.mark.parametrize("name", faults_of_services.CASES)
def test_service(name: str, tmp_path: Path, templates: Path) -> None:
    site = Site(tmp_path, "services", None, templates)
    with site.servers:
        faults_of_services.CASES[name](site)
        site.rerun()
        check_accounts(site)


@pytest.mark.parametrize("name", faults_of_services.ON_POSTGRES)
def test_postgres(name: str, tmp_path: Path, templates: Path, postgres_url: str) -> None:
    site = Site(tmp_path, name, postgres_url, templates)
    faults_of_services.ON_POSTGRES[name](site)
    site.rerun()
    check_accounts(site)


def test_poisoned_answers(site: Site) -> None:
    """Every poison fails its own trial and no other, and nothing of it is left in the books."""
    site.trials, site.may_fail = len(POISONS) + 2, True
    assert drive(site.spec, function=faults_of_answers.FUNCTION) == "trials"
    work = [one for one in stored(site.spec) if one.attempts]
    failed = [one.failure for one in sorted(work, key=lambda one: one.attempts[0].started_at)]
    wanted = dict.fromkeys(POISONS, FailureClass.PLUGIN_ERROR)
    assert dict(zip(POISONS, failed, strict=False)) == wanted
    assert failed[len(POISONS) :] == [None, None]
    site.rerun()
    check_accounts(site)


def test_there_are_enough_cases() -> None:
    coordinators, workers = faults_of_coordinators.CASES, faults_of_workers.CASES
    services = {**faults_of_services.CASES, **faults_of_services.ON_POSTGRES}
    assert len(coordinators) + len(workers) + len(services) >= 40


def _known(*_: object) -> None:
    """Nothing is."""


def _forget(*_: object) -> list[str]:
    return []


def _halve(folder: Path, name: str, weights: bytes) -> Path:
    (folder / name).write_bytes(weights[: len(weights) // 2])
    return folder / name


@pytest.mark.parametrize(
    ("function", "planted", "name"),
    [
        ("store.ledger.Ledger.lose_attempts", _forget, "kill -9 after submit"),
        ("coordinator.repair._repair_mirror", _forget, "kill -9 before tell"),
        ("tracking.view.View._read_runs", _forget, "kill -9 after publish"),
        ("coordinator.desk.write_weights", _halve, "kill -9 after submit"),
        ("coordinator.loop.find_evaluation", _known, "kill -9 after profile commit"),
    ],
)
def test_a_planted_fault_is_found(
    function: str,
    planted: object,
    name: str,
    tmp_path: Path,
    templates: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the coordinator that goes on after the kill."""
    site = Site(tmp_path, "planted", None, templates)
    monkeypatch.setattr(f"archsearch.{function}", planted)
    with pytest.raises(AssertionError):
        coordinator_case(name, site)
